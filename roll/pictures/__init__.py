"""Flow-matching models of pictures, as the engine that draws and the trainer both use them."""
