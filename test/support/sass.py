"""Facts about kernels, read from their machine code by the disassembler that Triton brings."""

import re
import subprocess
from pathlib import Path

import triton

_DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;")


def spills(cubin, folder):
    """Return the instructions that write registers to memory or read them from there, because there are too few.

    Args:
        cubin: machine code for compute capability 9.0.
        folder: for a temporary file.
    """
    return [f"{name} {text}" for name, text in _instructions(cubin, folder) if name.split(".")[0] in ("STL", "LDL")]


def reads_of_unwritten_registers(cubin, folder):
    """Return the instructions that read a uniform register which no earlier one writes, in the order of the code.

    Such registers hold the addresses of tiles in shared memory for tensor cores. The arguments are those of `spills`.
    """
    written, found = set(), []
    for name, text in _instructions(cubin, folder):
        operands = [each.strip() for each in text.split(",")]
        result = re.fullmatch(r"UR(\d+)", operands[0])
        sources = operands[1:] if result else operands
        # An instruction that picks bytes may name a register and pick none of its bytes.
        if "PRMT" not in name and not _uniform_registers(name, sources) <= written:
            found.append(f"{name} {text}")
        if result:
            first = int(result[1])
            written.update(range(first, first + (2 if ".64" in name or ".WIDE" in name else 1)))
    return found


def overwritten_operands(cubin, folder):
    """Return the instructions that write registers of which tensor cores may not have read their left operand yet.

    A product (wgmma) runs beside later instructions until the warp waits for it. In a loop these are the next round's,
    too. The arguments are those of `spills`.
    """
    instructions, found = [], []
    begins = {}
    for line in _listing(cubin, folder).splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            begins[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.search(line):
            instructions.append(instruction.groups())
            target = re.search(r"`\((\.L_\w+)\)", instruction[2])
            if instruction[1] == "BRA" and target and target[1] in begins:
                found += _writes_beside_products(instructions[begins[target[1]] :] * 2)
    return [*found, *_writes_beside_products(instructions)]


def names_with_waits(cubin, folder):
    """Return the instructions' names in the order of the code, and "wait N" for a wait that leaves N products running.

    The arguments are those of `spills`.
    """
    return [
        f"wait {int(text.split(',')[1], 16)}" if name == "WARPGROUP.DEPBAR.LE" else name
        for name, text in _instructions(cubin, folder)
    ]


def _writes_beside_products(instructions):
    found, unfinished, latest = [], [], set()  # registers of groups of products, and of the group that has no end yet
    for name, text in instructions:
        operands = [each.strip() for each in text.split(",")]
        if "HGMMA" in name:
            if left := re.match(r"R(\d+)", operands[1]):
                latest |= set(range(int(left[1]), int(left[1]) + 4))
            if "gsb0" in operands:
                unfinished, latest = [*unfinished, latest], set()
        elif name == "WARPGROUP.DEPBAR.LE":
            left_running = int(operands[1], 16)
            unfinished = unfinished[len(unfinished) - left_running :] if left_running < len(unfinished) else unfinished
        elif (result := re.match(r"R(\d+)", operands[0])) and not name.startswith(("ST", "RED", "LDGSTS")):
            size = 4 if "128" in name or "M88.4" in name else 2 if "64" in name or "WIDE" in name else 1
            if not latest.union(*unfinished).isdisjoint(range(int(result[1]), int(result[1]) + size)):
                found.append(f"{name} {text}")
    return found


def _instructions(cubin, folder):
    """Return the name and the operands of each instruction, in the order of the code."""
    return _INSTRUCTION.findall(_listing(cubin, folder))


def _listing(cubin, folder):
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([_DISASSEMBLER, "-c", file], capture_output=True, text=True, check=True).stdout


def _uniform_registers(name, sources):
    """Return the uniform registers that an instruction reads."""
    registers = set()
    for source in sources:
        for kind, number in re.findall(r"(gdesc\[|desc\[|)UR(\d+)", source):
            first = int(number)
            if kind == "gdesc[":  # of the left and the right tile; the left one may be in other registers
                registers.update(range(first + 2 if sources[1].startswith("R") else first, first + 4))
            else:
                is_pair = kind == "desc[" or name.startswith("UIADD3.64")
                registers.update(range(first, first + (2 if is_pair else 1)))
    return registers
