"""Sandboxes for programs that nobody has read: a strict one, a plain one, and pools of them."""
