"""Publishing a LoRA adapter alone: each version a folder that servers load beside the others."""
