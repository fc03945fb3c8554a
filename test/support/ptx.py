"""Facts about kernels, read from their PTX."""

import re

_POINTER_ARITHMETIC = re.compile(r"(?:add|sub|mad|mul|mov|selp|cvta|shl|or)\S*(?:64|wide)")
_READ = re.compile(r"ld\S*\.global|cp\.async\S*\.shared\S*\.global")


def sums_of_two_products(ptx):
    """Return the additions whose terms are both products."""
    instructions = re.findall(r"(fma\.rn|mul|add)(?:\.rn)?\.f32\s+(%\w+), ([^;]*);", ptx)
    products = {result for name, result, _ in instructions if name == "mul"}
    terms = [(name, operands.split(", ")) for name, _, operands in instructions]
    return [
        operands
        for name, operands in terms
        if (name == "fma.rn" and operands[2] in products) or (name == "add" and products.issuperset(operands))
    ]


def reads_before_wait(ptx):
    """Return the reads of global memory that a program may make before it waits for earlier kernels.

    Each is (number of the parameter that is the pointer or the tensor descriptor, instruction).

    Raises:
        ValueError: no parameter is known that an address is computed from.
    """
    instructions, labels = _instructions(ptx)
    parameters = _parameters_of_registers(instructions)
    found, seen, starts = set(), set(), [0]
    while starts:
        at = starts.pop()
        while at not in seen and at < len(instructions) and instructions[at][1] != "griddepcontrol.wait":
            seen.add(at)
            condition, name, operands = instructions[at]
            if name.startswith("bra"):
                starts.append(labels[operands.split()[-1]])
                if not condition:
                    break
            elif _READ.match(name):
                address = re.findall(r"\[\s*(%\w+)", operands)[:2][-1]  # the first is where a copy goes
                if not (numbers := parameters.get(address)):
                    raise ValueError(f"{name} {operands} reads before griddepcontrol.wait, and not from a parameter.")
                found |= {(number, name) for number in numbers}
            at += 1
    return found


def _instructions(ptx):
    """Return a kernel's instructions, (condition, name, operands), and the index of the instruction at each label."""
    instructions, labels = [], {}
    body = re.sub(r"//.*", "", ptx[ptx.index("{") + 1 :])
    for label, text in re.findall(r"^\s*(\$\w+):|^\s*([@a-z][^;]*);", body, re.MULTILINE):
        if label:
            labels[label] = len(instructions)
        else:
            instructions.append(re.fullmatch(r"(@!?%\w+)?\s*(\S+)\s*(.*)", text, re.DOTALL).groups())
    return instructions, labels


def _parameters_of_registers(instructions):
    """Return the numbers of the parameters that each register's address is computed from."""
    parameters = {}
    is_changed = True
    while is_changed:
        is_changed = False
        for _, name, operands in instructions:
            if not (name.startswith("ld.param") or _POINTER_ARITHMETIC.match(name)):
                continue
            result, *sources = re.findall(r"%\w+", operands)
            numbers = set(map(int, re.findall(r"_param_(\d+)", operands)))
            numbers = numbers.union(*(parameters.get(each, ()) for each in sources))
            known = parameters.setdefault(result, set())
            is_changed |= not numbers <= known
            known |= numbers
    return parameters
