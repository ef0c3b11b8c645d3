"""Text generation: plain, with images, and with Medusa heads; the report that measures Medusa heads."""
