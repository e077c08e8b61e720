from django.db import models


class Review(models.Model):
    """A text, and the stars that the rating task gives it."""

    text = models.TextField()
    stars = models.PositiveSmallIntegerField(null=True)
