"""Links the object file of one kernel to flat code: bytes that run at any address that is aligned to a page.

The code begins with the function `entry`. Behind it lie the functions and constants that it reaches. An object file is
in ELF's format, for x86-64 or arm64, compiled as position-independent code, so only distances are left to fill in.
"""

import struct
from collections import namedtuple
from typing import NamedTuple

_X86_64, _ARM64 = 62, 183  # ELF's numbers for processors
_RELOCATIONS, _WRITABLE = 4, 1  # a section's type, and the flag of sections that are written to

# How a relocation writes the distance from its place to its target. The numbers are those of the processors' ABIs.
_DISTANCES = {
    (_X86_64, 2): "word",  # PC32
    (_X86_64, 4): "word",  # PLT32
    (_ARM64, 261): "word",  # PREL32
    (_ARM64, 274): "address",  # ADR_PREL_LO21
    (_ARM64, 275): "page",  # ADR_PREL_PG_HI21
    (_ARM64, 282): "jump",  # JUMP26
    (_ARM64, 283): "jump",  # CALL26
}
# The low 12 bits of a target's address on arm64, in units of so many bytes: of ADD and of loads and stores.
_LOW_BITS = {277: 1, 278: 1, 284: 2, 285: 4, 286: 8, 299: 16}


class LinkError(ValueError):
    """A kernel that cannot stand alone: it calls a function outside itself, or needs data that can be written."""


# A section of an object file, as the file's table of sections says.
_Section = namedtuple("_Section", "name type flags address offset size link info alignment entry_size")


class _Symbol(NamedTuple):
    """A symbol of an object file: its name, its section's number (0: defined elsewhere) and its place there."""

    name: str
    section: int
    value: int


def link(kernel: str, elf: bytes) -> bytes:
    """Return the flat code of an object file. Raises `LinkError` about the kernel's name if the code needs more.

    Example: code that calls `log` of the C library raises "kernel k: calls log, ...".
    """
    machine, table, n_sections = struct.unpack_from("<18xH20xQ12xH", elf)
    sections = [_Section(*fields) for fields in struct.iter_unpack("<IIQQQQIIQQ", elf[table : table + 64 * n_sections])]
    contents = [elf[section.offset : section.offset + section.size] for section in sections]
    symbols = _symbols(sections, contents)
    relocations = {
        section.info: content
        for section, content in zip(sections, contents, strict=True)
        if section.type == _RELOCATIONS
    }
    reached = [next(symbol.section for symbol in symbols if symbol.name == "entry")]
    code, starts, distances = bytearray(), dict[int, int](), list[tuple[int, int, _Symbol, int]]()
    for number in reached:  # grows
        code += bytes(-len(code) % max(1, sections[number].alignment))
        starts[number] = len(code)
        code += contents[number]
        for place, info, addend in struct.iter_unpack("<QQq", relocations.get(number, b"")):
            symbol = symbols[info >> 32]
            if not 0 < symbol.section < len(sections) or sections[symbol.section].flags & _WRITABLE:
                wrong = "writes to a global variable of" if symbol.section else "calls"
                raise LinkError(f"kernel {kernel}: {wrong} {symbol.name}, outside it; write the body without")
            if symbol.section not in reached:
                reached.append(symbol.section)
            distances.append((starts[number] + place, info & 0xFFFF_FFFF, symbol, addend))
    for place, kind, symbol, addend in distances:
        if not _fill(code, machine, kind, place, starts[symbol.section] + symbol.value + addend):
            raise LinkError(f"kernel {kernel}: relocation {kind} of {symbol.name} is not supported")
    return bytes(code)


def _symbols(sections: list[_Section], contents: list[bytes]) -> list[_Symbol]:
    number = next(number for number, section in enumerate(sections) if section.type == 2)
    names = contents[sections[number].link]
    return [
        _Symbol(names[name : names.index(0, name)].decode(), section, value)
        for name, section, value in struct.iter_unpack("<I2xHQ8x", contents[number])
    ]


def _fill(code: bytearray, machine: int, number: int, place: int, target: int) -> bool:
    """Write the distance from `place` to `target`, both offsets in the code, as a relocation's number says."""
    distance, kind = target - place, _DISTANCES.get((machine, number))
    (word,) = struct.unpack_from("<I", code, place)
    if kind == "word":
        word = distance & 0xFFFF_FFFF
    elif kind == "jump":
        word |= distance >> 2 & 0x3FF_FFFF
    elif kind in ("address", "page"):
        units = distance if kind == "address" else (target >> 12) - (place >> 12)
        word |= (units & 3) << 29 | (units >> 2 & 0x7_FFFF) << 5
    elif machine == _ARM64 and number in _LOW_BITS:
        word |= (target & 0xFFF) // _LOW_BITS[number] << 10
    else:
        return False
    struct.pack_into("<I", code, place, word)
    return True
