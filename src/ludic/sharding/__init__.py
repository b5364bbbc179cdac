"""One model on several ranks: who is who, FSDP2, and whole weights out of shards."""
