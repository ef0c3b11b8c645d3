"""`python -m ligertune`: the `ligertune` command, for `accelerate launch -m` and torchrun."""

from ligertune.cli.app import main

if __name__ == "__main__":
    main()
