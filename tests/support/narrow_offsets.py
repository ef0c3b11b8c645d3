"""Finds in Triton's intermediate code (TTIR) memory offsets that overflow in tensors of more than 2**31 elements.

A row's number fits into 32 bits. A row's number times a stride does not, so that product must be taken in 64 bits. Only
a GPU with enough memory could show the overflow by its results; the type of the product shows it everywhere.
"""

from __future__ import annotations

import re


def narrow_offsets(ttir: str) -> tuple[str, ...]:
    """Return the pointer arguments with an offset that is a 32-bit product of a program's number and an argument."""
    constants: set[str] = set()
    by_program: set[str] = set()  # values that depend on the program's number
    products: set[str] = set()  # 32-bit products of such a value and a value that is not known at compile time
    pointers = {name: name.lstrip("%") for name in re.findall(r"(%\w+): !tt\.ptr", ttir)}
    found: set[str] = set()

    def follow(results: list[str], operands: list[str]) -> None:
        for values in (by_program, products):
            if any(operand in values for operand in operands):
                values.update(results)
        if operands and operands[0] in pointers:
            pointers.update(dict.fromkeys(results, pointers[operands[0]]))

    for line in ttir.splitlines():
        written, body = re.match(r"\s*(?:((?:%[\w:]+(?:, )?)+) = )?(.*)$", line.split(" loc(")[0]).groups()
        results = [name.split(":")[0] for name in (written or "").split(", ") if name]
        operands = re.findall(r"%\w+", body)
        if body.startswith("scf.for"):
            for argument, first in re.findall(r"(%\w+) = (%\w+)", body):
                follow([argument], [first])
            index, first, last = re.match(r"scf\.for (%\w+) = (%\w+) to (%\w+)", body).groups()
            follow([index], [first, last])
        for values in (constants, by_program, products):
            values.difference_update(results)  # names are those of a region, and come again in the next one
        if body.startswith("arith.constant") or (
            re.match(r"tt\.(splat|broadcast|expand_dims)|arith\.ext", body) and operands[0] in constants
        ):
            constants.update(results)
        elif body.startswith("tt.get_program_id"):
            by_program.update(results)
        elif not re.match(r"tt\.(load|dot)|arith\.cmp", body):
            follow(results, operands)
            if re.match(r"arith\.muli .*i32>*$", body) and any(
                one in by_program and other not in constants for one, other in (operands[:2], operands[1::-1])
            ):
                products.update(results)
            if body.startswith("tt.addptr") and operands[1] in products:
                found.add(pointers.get(operands[0], operands[0]))
    return tuple(sorted(found))
