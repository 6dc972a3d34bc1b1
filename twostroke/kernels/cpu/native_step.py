"""The struct of an attention step for native kernels. The kernels of a page form fill in where its pages lie."""

from __future__ import annotations

import ctypes


class NativeRule(ctypes.Structure):
    """Mirrors `AttentionRule` of attention.h, field by field."""

    _fields_ = (
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("rope", ctypes.c_int64),
    )


class NativeStep(ctypes.Structure):
    """Mirrors `AttentionStep` of attention.h, field by field."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("layer_stride", ctypes.c_int64),
        ("value_offset", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("ropes", ctypes.c_int64),
        ("write_slots", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("sequences", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("rules", ctypes.POINTER(NativeRule)),
        ("dtype", ctypes.c_int32),
        ("form", ctypes.c_int32),
        ("key_centers", ctypes.c_void_p),
        ("exact_pool", ctypes.c_void_p),
        ("exact_page_stride", ctypes.c_int64),
        ("exact_layer_stride", ctypes.c_int64),
        ("exact_value_offset", ctypes.c_int64),
        ("exact_head_stride", ctypes.c_int64),
        ("exact_slots", ctypes.c_void_p),
        ("latent_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
    )
