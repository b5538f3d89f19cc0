"""x"""


def translate(given):
    raise NotImplementedError
