"""The Python text around a program under test, as the sandbox runs it.

The program is given as text in a text, so its lines keep their numbers and it cannot swallow what comes after it. What
is asked of it waits unread in a pipe until its turn, so that it can be found neither in a file nor in a frame. None of
this makes the process trustworthy: a program that reads the pipe, or whose objects are equal to everything, gets an
assertion to hold. docs/rewards.md says what is protected and what is not.
"""

from __future__ import annotations

_HEAD = """
import builtins, os, sys, types
builtins.exit = builtins.quit = sys.exit  # the bare interpreter has neither
PROGRAM = {program}
"""

_PLAIN = """
def main(program):
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "program.py", "exec", dont_inherit=True), vars(module))

main(PROGRAM)
"""

# All that the program could replace (builtins, functions of modules, this module's own names) is bound before it runs.
_ASKED = """
import json

def main(program, run=exec, compiled=compile, read=os.read, write=os.write, load=json.loads, dump=json.dumps,
         base=BaseException, number=int, length=len, mutable=bytearray):
    questions, answers, nothing = os.dup(0), os.dup(1), os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)

    def taken(size):
        data = mutable()
        while length(data) < size:
            chunk = read(questions, size - length(data))
            if not chunk:
                break
            data += chunk
        return data.decode()

    def section():
        size = taken(16)
        return taken(number(size, 16)) if size else None

    def tell(text):
        data = text.encode()
        while data:
            data = data[write(answers, data):]

    module = sys.modules["program"] = types.ModuleType("program")
    names = vars(module)
    run(compiled(program, "program.py", "exec", dont_inherit=True), names)
"""

_CALLING = (
    _ASKED
    + """
    name, arguments = load(section())
    owner = names["Solution"]() if name not in names and "Solution" in names else None
    function = names[name] if owner is None else getattr(owner, name)
    returned = dump(function(*arguments))
    tell("\\n" + section() + returned + "\\n")

main(PROGRAM)
"""
)

_ASSERTING = (
    _ASKED
    + """
    while (question := section()) is not None:
        try:
            run(compiled(question, "asserts.py", "exec", dont_inherit=True), names)
        except base as error:
            os.write(2, (type(error).__name__ + "\\n").encode())
            section()
        else:
            tell("\\n" + section() + "\\n")

main(PROGRAM)
"""
)


def plain(program: str) -> str:
    """The program as `__main__`, with standard input and output its own."""
    return _HEAD.format(program=ascii(program)) + _PLAIN


def calling(program: str) -> str:
    """The program as a module, then one call; standard input: `sections` of JSON ``[function, arguments]`` and of a
    marker, after which the result comes out as a line of JSON. A function that is not there is looked for in a class
    `Solution`."""
    return _HEAD.format(program=ascii(program)) + _CALLING


def asserting(program: str) -> str:
    """The program as a module, then assertions in its namespace; standard input: `sections` of assertion and proof in
    turn. The proofs of those that hold come out."""
    return _HEAD.format(program=ascii(program)) + _ASSERTING


def sections(*texts: str) -> str:
    """Texts that a process can take from a pipe one by one, each after its length in bytes."""
    return "".join(f"{len(text.encode('utf-8', 'replace')):016x}{text}" for text in texts)
