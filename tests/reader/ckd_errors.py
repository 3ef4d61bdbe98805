"""The two ways in which the independent reader refuses something."""


class Corrupt(Exception):
    """Damaged or missing: the bytes are not what a store may contain."""


class Unsupported(Exception):
    """Made by a newer version, or by a feature that this reader does not know."""
