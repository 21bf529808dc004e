"""Plain-Python twins that judge the compiled modules: written for clarity, from the specification alone, with
no code of the package in them."""
