"""Vision-language models.

`model` (how images enter a forward), `image_processor`, `building` (tiny ones for tests).
"""
