from django.urls import path

from . import views

urlpatterns = [
    path("reviews", views.create),
    path("reviews/<int:pk>", views.show),
]
