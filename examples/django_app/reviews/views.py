from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_GET, require_POST

from .models import Review
from .tasks import rate


@require_POST
@transaction.atomic
def create(request: HttpRequest) -> JsonResponse:
    """Save the body as a review; it will be rated if the transaction is committed."""
    review = Review.objects.create(text=request.body.decode())
    rate.delay_on_commit(review.pk)
    return JsonResponse({"id": review.pk}, status=202)


@require_GET
def show(request: HttpRequest, pk: int) -> JsonResponse:
    return JsonResponse({"stars": get_object_or_404(Review, pk=pk).stars})
