"""The pages of dead jobs in Django's admin: a list over all queues, a job with its error, retry and discard."""

import json
from collections.abc import Mapping
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.http import urlencode

from forq.contrib.django.dead_jobs import Changed, DeadRow, ProjectDeadJobs, Verb, as_time
from forq.contrib.django.models import DeadJob
from forq.contrib.django.project import discover_tasks, project_app
from forq.errors import ForqError, RedisUnavailable, UnknownJob, UnknownQueue

PER_PAGE = 50
# More is a mistake, or not from this page.
MAX_SELECTED = 1000
# Refused jobs that a message names.
SHOWN_REFUSED = 5
_DONE = {"retry": "Retried", "discard": "Discarded"}
_LOGGED = {"retry": CHANGE, "discard": DELETION}
_SELECTED = "_selected_action"


@admin.register(DeadJob)
class DeadJobAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # generic in django-stubs alone
    """The model has no table: each view reads Redis instead of a query set."""

    def get_urls(self) -> list[URLPattern]:
        protect = self.admin_site.admin_view
        return [
            path("", protect(self.changelist_view), name="forq_deadjob_changelist"),
            path("<path:object_id>/change/", protect(self.change_view), name="forq_deadjob_change"),
        ]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def changelist_view(self, request: HttpRequest, extra_context: Mapping[str, Any] | None = None) -> HttpResponse:
        """The list; with POST, retries or discards the selected jobs."""
        if not self.has_view_or_change_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self._change_selected(request)
        queue, after = request.GET.get("queue") or None, request.GET.get("after") or None
        rows: list[DeadRow] = []
        following, queues, status, error = None, [], 200, None
        try:
            dead = _dead_jobs()
            queues = dead.queues
            rows, following = dead.page(queue, after, PER_PAGE)
        except ForqError as exc:
            status, error = _status_of(exc), str(exc)
        kept = {"queue": queue} if queue else {}
        context = {
            **self._context(request, "Dead jobs"),
            "rows": [(row, quote(row.reference)) for row in rows],
            "queues": queues,
            "queue": queue,
            "is_first": after is None,
            "first_page": f"?{urlencode(kept)}",
            "next_page": f"?{urlencode({**kept, 'after': following})}" if following else None,
            "error": error,
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/forq/deadjob/change_list.html", context, status=status)

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: Mapping[str, Any] | None = None,
    ) -> HttpResponse:
        """One job. Its data is shown on request: it may be personal."""
        if not self.has_view_or_change_permission(request):
            raise PermissionDenied
        reference = unquote(object_id)
        job: dict[str, Any] = {}
        status, error = 200, None
        try:
            job = _dead_jobs().show(reference)
        except (UnknownJob, UnknownQueue) as exc:
            messages.warning(request, f"{exc}. It was retried or discarded, or it is no longer kept.")
            return HttpResponseRedirect(reverse("admin:forq_deadjob_changelist", current_app=self.admin_site.name))
        except ForqError as exc:
            status, error = _status_of(exc), str(exc)
        context = {
            **self._context(request, reference),
            **_shown(job),
            "reference": reference,
            "data": _as_json(job.get("data")) if "data" in request.GET else None,
            "error": error,
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/forq/deadjob/change_form.html", context, status=status)

    def _change_selected(self, request: HttpRequest) -> HttpResponse:
        back = HttpResponseRedirect(request.get_full_path())
        action, references = request.POST.get("action"), request.POST.getlist(_SELECTED)[:MAX_SELECTED]
        allowed = {"retry": self.has_change_permission, "discard": self.has_delete_permission}
        if action not in allowed:
            messages.warning(request, "No action was selected.")
            return back
        if not allowed[action](request):
            raise PermissionDenied
        if not references:
            messages.warning(request, "No job was selected.")
            return back
        if action == "discard" and request.POST.get("post") != "yes":
            context = {**self._context(request, "Discard dead jobs"), "references": references}
            return TemplateResponse(request, "admin/forq/deadjob/discard_confirmation.html", context)
        verb: Verb = "retry" if action == "retry" else "discard"
        try:
            changed = _dead_jobs().change(verb, references)
        except ForqError as exc:
            messages.error(request, str(exc))
            return back
        _log(request, verb, changed)
        _report(request, verb, changed)
        return back

    def _context(self, request: HttpRequest, title: str) -> dict[str, Any]:
        # The site whose pages the templates link to.
        request.current_app = self.admin_site.name
        return {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": title,
            "may_retry": self.has_change_permission(request),
            "may_discard": self.has_delete_permission(request),
            "media": self.media,
        }


def _dead_jobs() -> ProjectDeadJobs:
    # A web server need not have imported the tasks, which name the queues.
    discover_tasks()
    return ProjectDeadJobs(project_app())


def _status_of(exc: ForqError) -> int:
    if isinstance(exc, UnknownQueue):
        return 404
    return 503 if isinstance(exc, RedisUnavailable) else 400


def _log(request: HttpRequest, verb: Verb, changed: Changed) -> None:
    """Entries of the admin's history, also for jobs whose fate is unknown."""
    texts = dict.fromkeys(changed.done, f"{_DONE[verb]}.") | {
        reference: f"Tried to {verb}: {reason}" for reference, reason in changed.unknown.items()
    }
    content_type = get_content_type_for_model(DeadJob)
    LogEntry.objects.bulk_create(
        LogEntry(
            user_id=request.user.pk,
            content_type_id=content_type.pk,
            object_id=reference,
            object_repr=reference[:200],
            action_flag=_LOGGED[verb],
            change_message=text,
        )
        for reference, text in texts.items()
    )


def _report(request: HttpRequest, verb: Verb, changed: Changed) -> None:
    if changed.done:
        count = len(changed.done)
        messages.success(request, f"{_DONE[verb]} {count} {'job' if count == 1 else 'jobs'}.")
    failed = changed.refused | changed.unknown
    if failed:
        texts = [f"{reference}: {reason}" for reference, reason in list(failed.items())[:SHOWN_REFUSED]]
        more = f"; and {len(failed) - SHOWN_REFUSED} more" if len(failed) > SHOWN_REFUSED else ""
        messages.error(request, f"Could not {verb} {len(failed)}: {'; '.join(texts)}{more}")


def _shown(job: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows of a job; broken parts are text."""
    error = job.get("error")
    failure = error if isinstance(error, dict) else {"message": error}
    attempts = [each if isinstance(each, dict) else {"error": each} for each in job.get("attempts", [])]
    return {
        "job": job,
        "died_at": as_time(job["died_at"]) if "died_at" in job else None,
        "enqueued_at": as_time(job["enqueued_at"]) if "enqueued_at" in job else None,
        "failure": failure,
        "attempts": [_shown_attempt(each) for each in attempts],
        "options": _as_json(job["options"]) if job.get("options") else None,
    }


def _shown_attempt(attempt: Mapping[str, Any]) -> dict[str, Any]:
    ended, error = attempt.get("ended_at"), attempt.get("error")
    return {
        **attempt,
        "ended_at": as_time(ended) if isinstance(ended, int | float) else None,
        "error": error if error is None or isinstance(error, dict) else {"message": error},
    }


def _as_json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, indent=2)
