"""Decoders as straight-line functions over a batch: in torch, in one native call, and on a device."""
