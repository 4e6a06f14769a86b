"""The gateway's application: the routes for clients and those for whoever runs the server."""

from __future__ import annotations

from starlette.applications import Starlette

from cb_backend.serving.admin_api import AdminRoutes
from cb_backend.serving.api_errors import EXCEPTION_HANDLERS
from cb_backend.serving.language_model import LanguageModel
from cb_backend.serving.openai_api import OpenAIRoutes


class Gateway:
    """Until `serve` has been called, every route answers 503."""

    def __init__(self, *, admin_key: str | None) -> None:
        self._openai = OpenAIRoutes()
        self._admin = AdminRoutes(admin_key)

    def application(self) -> Starlette:
        return Starlette(
            routes=[*self._openai.routes(), *self._admin.routes()],
            exception_handlers=EXCEPTION_HANDLERS,
        )

    def serve(self, model: LanguageModel) -> None:
        self._openai.model = model
        self._admin.engine = model.engine
