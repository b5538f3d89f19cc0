"""Weight updates from trainer to engines: buckets, buffers, transports, verification."""
