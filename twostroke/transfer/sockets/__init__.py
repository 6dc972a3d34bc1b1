"""Page connections over sockets: frames with deadlines, the handshake, TLS, and the owner's listener."""
