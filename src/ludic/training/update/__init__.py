"""One update: packed micro-batches through the model, gradients, the optimizer step."""
