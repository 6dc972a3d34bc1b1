"""The header of a GGUF file, read by the `gguf` package.

The package takes 0.2 s to import, so this module is imported only for such a file.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFValueType

NATIVE: Final = "I"
"""The library's name of this machine's byte order."""
Parts = tuple[int, list[Any], list[int], list[GGUFValueType]]


class HeaderReader(GGUFReader):  # type: ignore[misc]  # the package has no types
    """Reads a header without the elements of arrays: the library takes seconds to make numpy arrays of a vocabulary."""

    def facts(self) -> dict[str, Any]:
        """Returns numbers and strings by name. Of an array, which may be long, it returns only the length."""
        return {name: _value(field) for name, field in self.fields.items() if not name.startswith("GGUF.")}

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Parts:
        if raw_type != GGUFValueType.ARRAY:
            parts: Parts = super()._get_field_parts(orig_offs, raw_type)
            return parts
        content = memoryview(self.data)
        of, count = struct.unpack_from("<IQ", content, orig_offs)
        at = orig_offs + 12
        if of == GGUFValueType.STRING:
            length = struct.Struct("<Q").unpack_from
            for _ in range(count):
                at += 8 + length(content, at)[0]
        else:
            at += count * self.gguf_scalar_to_np[GGUFValueType(of)]().itemsize
        return at - orig_offs, [self._get(orig_offs + 4, "<u8")], [0], [GGUFValueType.ARRAY]


def block_bytes(tensor: Any) -> int:
    """Returns the bytes of one block of a tensor's type, the numbers that are stored together."""
    size: int = GGML_QUANT_SIZES[tensor.tensor_type][1]
    return size


def _value(field: Any) -> Any:
    value = field.parts[field.data[0]]
    return bytes(value).decode(errors="replace") if field.types[0] == GGUFValueType.STRING else value[0].item()
