"""How applications use holdfast from Python."""
