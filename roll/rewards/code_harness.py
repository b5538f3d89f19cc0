"""The Python code that wraps a program under test inside the sandbox.

The program is embedded as a string literal, so its lines keep their numbers and it cannot swallow the code after it.
The questions wait unread in a pipe until their turn, so the program can find them neither in a file nor in a stack
frame. This does not make the process trustworthy: a program that reads the pipe, or whose objects are equal to
everything, can make an assertion hold. docs/rewards.md says what is protected and what is not.
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

# The harness binds everything that the program could replace (builtins, module functions, its own names) before it runs
# the program.
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
    """Return code that runs the program as `__main__`, with standard input and output of its own."""
    return _HEAD.format(program=ascii(program)) + _PLAIN


def calling(program: str) -> str:
    """Return code that runs the program as a module and then makes one call.

    Standard input: `sections` of JSON ``[function, arguments]`` and of a marker. The result follows the marker on
    standard output, as a line of JSON. A function that the module does not define is looked up in a class `Solution`.
    """
    return _HEAD.format(program=ascii(program)) + _CALLING


def asserting(program: str) -> str:
    """Return code that runs the program as a module and then assertions in its namespace.

    Standard input: `sections` of assertion and proof in turn. The proofs of the assertions that hold are printed.
    """
    return _HEAD.format(program=ascii(program)) + _ASSERTING


def sections(*texts: str) -> str:
    """Return texts that a process can read from a pipe one by one, each preceded by its length in bytes."""
    return "".join(f"{len(text.encode('utf-8', 'replace')):016x}{text}" for text in texts)
