"""Features: each folder holds everything of one kind of training, and registers it by its modules `recipe` and `spec`.

The recipe's schema is made of all features' sections, so it is loaded before the modules of any feature.
"""

import ligertune.recipe  # noqa: F401
