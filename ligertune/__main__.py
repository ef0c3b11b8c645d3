"""`python -m ligertune`: the same as the console script, for `accelerate launch -m` and torchrun."""

from ligertune.cli.app import main

if __name__ == "__main__":
    main()
