"""Links the object file of one kernel to flat code: bytes that run at any address that is aligned to a page.

The code begins with the function `entry`. Behind it lie the functions and constants that it reaches. An object file is
in ELF's format, for x86-64 or arm64, compiled as position-independent code, so only distances are left to fill in.
"""

from __future__ import annotations

import struct
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


class _Section(NamedTuple):
    """A section of an object file, as the file's table of sections says."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    """A symbol of an object file: its name, its section's number (0: defined elsewhere) and its place there."""

    name: str
    section: int
    value: int


class _Relocation(NamedTuple):
    """A place in a section that takes the distance to a symbol; `addend` is added to the distance."""

    place: int
    type: int
    symbol: _Symbol
    addend: int


def link(kernel: str, elf: bytes) -> bytes:
    """Return the flat code of an object file. Raises `LinkError` about the kernel's name if the code needs more.

    Example: code that calls `log` of the C library raises "kernel k: calls log, ...".
    """
    machine, table, n_sections = struct.unpack_from("<18xH20xQ12xH", elf)
    sections = [_Section(*fields) for fields in struct.iter_unpack("<IIQQQQIIQQ", elf[table : table + 64 * n_sections])]
    symbols = _symbols(elf, sections)
    relocations = {
        section.info: [
            _Relocation(place, info & 0xFFFF_FFFF, symbols[info >> 32], addend)
            for place, info, addend in struct.iter_unpack("<QQq", _contents(elf, section))
        ]
        for section in sections
        if section.type == _RELOCATIONS
    }
    reached = [next(symbol.section for symbol in symbols if symbol.name == "entry")]
    code, starts = bytearray(), {}
    for number in reached:  # grows
        section = sections[number]
        code += bytes(-len(code) % max(1, section.alignment))
        starts[number] = len(code)
        code += _contents(elf, section)
        for each in relocations.get(number, ()):
            target = each.symbol.section
            if not 0 < target < len(sections) or sections[target].flags & _WRITABLE:
                wrong = "writes to a global variable of" if target else "calls"
                raise LinkError(f"kernel {kernel}: {wrong} {each.symbol.name}, outside it; write the body without")
            if target not in reached:
                reached.append(target)
    for number in reached:
        for each in relocations.get(number, ()):
            target = starts[each.symbol.section] + each.symbol.value + each.addend
            _fill(kernel, code, machine, each, starts[number] + each.place, target)
    return bytes(code)


def _contents(elf: bytes, section: _Section) -> bytes:
    return elf[section.offset : section.offset + section.size]


def _symbols(elf: bytes, sections: list[_Section]) -> list[_Symbol]:
    table = next(section for section in sections if section.type == 2)
    names = _contents(elf, sections[table.link])
    return [
        _Symbol(names[name : names.index(0, name)].decode(), section, value)
        for name, section, value in struct.iter_unpack("<I2xHQ8x", _contents(elf, table))
    ]


def _fill(kernel: str, code: bytearray, machine: int, relocation: _Relocation, place: int, target: int) -> None:
    """Write the distance from `place` to `target`, both offsets in the code, as the relocation's type says."""
    distance, kind = target - place, _DISTANCES.get((machine, relocation.type))
    (word,) = struct.unpack_from("<I", code, place)
    if kind == "word":
        word = distance & 0xFFFF_FFFF
    elif kind == "jump":
        word |= distance >> 2 & 0x3FF_FFFF
    elif kind in ("address", "page"):
        number = distance if kind == "address" else (target >> 12) - (place >> 12)
        word |= (number & 3) << 29 | (number >> 2 & 0x7_FFFF) << 5
    elif machine == _ARM64 and relocation.type in _LOW_BITS:
        word |= (target & 0xFFF) // _LOW_BITS[relocation.type] << 10
    else:
        raise LinkError(f"kernel {kernel}: relocation {relocation.type} of {relocation.symbol.name} is not supported")
    struct.pack_into("<I", code, place, word)
