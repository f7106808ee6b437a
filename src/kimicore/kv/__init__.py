"""Where the bytes of the KV cache lie: the device's arena, the host's, and the store on disk."""
