"""How long a run takes on how many GPUs, and whether it fits, before anything is started: no torch.

`profile` has the constants of a machine and where each comes from, `costs` turns a model and a
profile into seconds, `workload` is what an update samples, `simulation` plays the updates event by
event, `search` tries splits into trainer and servers, and `report` writes what came out.
"""
