"""What is trained: tasks, public data, and gradients that anyone can recompute bit for bit. Read ``task`` first."""
