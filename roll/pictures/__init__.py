"""Flow-matching image models, shared by the image engine and the trainers."""
