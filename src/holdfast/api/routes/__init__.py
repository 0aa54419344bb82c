"""One file per noun: its endpoints, declared with who may call them."""
