"""Whether every descriptor that a wgmma product reads is there, on each path to it, in what ptxas
made of a kernel.

A product of Hopper finds its tiles by descriptors in uniform registers. The ptxas of triton 3.6 was
seen to compute the descriptor of the queries once for two loops, on the path into the first: where
that one was passed over, the second read whatever the register held, which is an illegal address
or, worse, another tile.
"""

import re
import subprocess
import tempfile
from collections import deque

import triton

UNDEFINED = frozenset([-1])  # as if by an instruction before the entry
LABEL = re.compile(r"\s*(\.L_x_\d+):")
INSTRUCTION = re.compile(
    r"\s*/\*[0-9a-f]{4,}\*/\s+(?P<predicate>@!?\w+ "
    r")?\s*(?P<name>[A-Z][\w.]*)\s*(?P<operands>.*?)\s*;"
)
# Instructions whose first operand is the uniform register that they write, whatever else they are
# named for.
WRITES = re.compile(r"(U(?!TMA|BLK|CGA)|R2UR|S2UR|LDCU|VOTEU)")


class Instruction:
    """One instruction: its text, the instructions that may follow it, and the uniform registers
    that it writes.
    """

    def __init__(self, match: re.Match):
        self.text = " ".join(match[0].rstrip(" ;").split()[1:])
        self.name, self.operands, self.is_predicated = (
            match["name"],
            match["operands"],
            bool(match["predicate"]),
        )
        self.successors: list[int] = []
        target = re.match(r"UR(\d+)\b", self.operands)
        self.writes = range(0)
        if target and WRITES.match(self.name):
            width = (
                4 if ".128" in self.name else 2 if ".64" in self.name or ".WIDE" in self.name else 1
            )
            self.writes = range(int(target[1]), int(target[1]) + width)


def parse(sass: str) -> list[Instruction]:
    """Returns the instructions of `nvdisasm -c` of one kernel."""
    instructions, labels = [], {}
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif match := INSTRUCTION.match(line):
            instructions.append(Instruction(match))
    for index, instruction in enumerate(instructions):
        kind = instruction.name.split(".")[0]
        if kind in ("BRA", "CALL"):
            instruction.successors += [
                labels[x] for x in re.findall(r"`\((\.L_x_\d+)\)", instruction.operands)
            ]
        # A branch may have its condition among its operands.
        is_last = kind in ("BRA", "BRX", "EXIT", "RET") and not instruction.is_predicated
        if index + 1 < len(instructions) and (
            not is_last or instruction.operands.startswith(("U", "!U"))
        ):
            instruction.successors.append(index + 1)
    return instructions


def reaching(instructions: list[Instruction]) -> list[dict[int, frozenset[int]]]:
    """Returns, before each instruction, the instructions by number that may have written each
    uniform register.

    Entries are the first instruction and, since the branch to the parts of a warp-specialised
    kernel goes by a table, the first of what no other branch reaches.
    """
    before: list[dict[int, frozenset[int]] | None] = [None] * len(instructions)
    registers = {register for instruction in instructions for register in instruction.writes}
    for entry in range(len(instructions)):
        if before[entry] is not None:
            continue
        before[entry] = dict.fromkeys(registers, UNDEFINED)
        work = deque([entry])
        while work:
            index = work.popleft()
            instruction, after = instructions[index], dict(before[index])
            for register in instruction.writes:
                kept = after[register] if instruction.is_predicated else frozenset()
                after[register] = kept | {index}
            for successor in instruction.successors:
                known = before[successor]
                joined = (
                    after
                    if known is None
                    else {register: known[register] | after[register] for register in after}
                )
                if joined != known:
                    before[successor] = joined
                    work.append(successor)
    return before


def misread_descriptors(sass: str) -> list[str]:
    """Returns the products whose descriptor some path to them leaves undefined, or as it was for
    something else.

    A product reads the registers from `gdesc` on: two of its left operand, where that is in shared
    memory, and two of its right one. The left one's are written in one place, which every path
    passes.
    """
    instructions = parse(sass)
    found = []
    for instruction, definitions in zip(instructions, reaching(instructions), strict=True):
        if not instruction.name.startswith("HGMMA"):
            continue
        first = int(re.search(r"gdesc\[UR(\d+)\]", instruction.operands)[1])
        is_left_shared = re.match(r"R\d+, gdesc", instruction.operands) is not None
        left = range(first, first + 2) if is_left_shared else range(0)
        read = {
            register: definitions.get(register, UNDEFINED)
            for register in (*left, first + 2, first + 3)
        }
        if any(UNDEFINED & written for written in read.values()) or any(
            len(read[register]) > 1 for register in left
        ):
            found.append(instruction.text)
    return found


def disassemble(cubin: bytes) -> str:
    """Returns the instructions of a compiled kernel, by the disassembler that Triton brings
    along.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout
