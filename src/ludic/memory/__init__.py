"""What a run takes of a device, computed from sizes alone: no torch, no model.

`shape` is how large a model is, `engine` what sampling from it takes, `update` what training it
takes, and `plan` puts the two together: does it fit, and what would make it fit?
"""
