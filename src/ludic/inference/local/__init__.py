"""The in-process engine: samples from the very module that is being trained.

A request takes this way through it, which is also an order to read the files in:

- `client`: the public interface, in the caller's event loop; `admission` decides who may enter.
- `engine_thread`: the thread that computes, and how it pauses while weights change.
- `scheduler`, `sequence`, `arena`, `prefix_store`: which sequences are computed next, and where
  their keys and values are. `eager` and `gpu/` are two independent ways to compute the steps.
- `view`, `attention`: the trainer's module as the engine calls it; `copies`: its stand-in in mixed
  precision.
- `sampler`: from logits to tokens.
- `build`, `row_sizes`, `family_check`: put an engine together and check that it is right.
"""

from ludic.inference.local.client import LocalChatClient as LocalChatClient
