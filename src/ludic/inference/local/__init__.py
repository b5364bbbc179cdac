"""The in-process engine: samples from the very module that is being trained.

A request's way through it, which is also an order to read the files in:

- `client`: the public face, in the caller's event loop; `request_check`, `queue_gate` are its door.
- `engine_thread`: the thread that computes, and how it stands still while weights change.
- `scheduler`, `sequence`, `arena`, `prefix_store`: who is computed next, and where keys and values
  lie. `cpu/` and `gpu/` compute the steps, each in its way; neither knows the other.
- `module_view`, `forward`, `attention`, `slot_layout`: the trainer's module as the engine calls it;
  `shadow`: the copy that stands for it in mixed precision.
- `outcomes`, `sampler`, `noise`: from logits to tokens.
- `build`, `family_check`, `reference`: puts an engine together and checks that it is right.
"""

from ludic.inference.local.client import LocalChatClient as LocalChatClient
