"""What kernels name when they are defined."""


class constexpr:
    def __init__(self, value: object) -> None:
        self.value = value
