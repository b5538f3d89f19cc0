"""The weight update, whole: buckets, buffers, transports, verification."""
