"""The in-process engine: samples from the very module that is being trained.

A request's way through it, which is also an order to read the files in:

- `client`: the public face, in the caller's event loop; `admission` is its door.
- `engine_thread`: the thread that computes, and how it stands still while weights change.
- `scheduler`, `sequence`, `arena`, `prefix_store`: who is computed next, and where keys and values
  lie. `eager` and `gpu/` compute the steps, each in its way; neither knows the other.
- `view`, `attention`: the trainer's module as the engine calls it; `copies`: the one that stands
  for it in mixed precision.
- `sampler`: from logits to tokens.
- `build`, `row_sizes`, `family_check`: put an engine together and check that it is right.
"""

from ludic.inference.local.client import LocalChatClient as LocalChatClient
