"""Import of YAML files of Axolotl, LLaMA-Factory and TRL as recipes."""
