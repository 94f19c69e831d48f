"""One pool in a cluster in memory, and an operator that reconciles it and can be restarted."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tests.operator.memory import Memory

from kvist_operator.cluster.capabilities import Capabilities
from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import (
    CHILDREN,
    DEPLOYMENT,
    Target,
)
from kvist_operator.cluster.pool_cache import PoolCache, PoolInformer, PoolKey
from kvist_operator.cluster.presets import Presets
from kvist_operator.manifests import Site
from kvist_operator.models.source import model_facts
from kvist_operator.plan import Plan
from kvist_operator.reconcile.model_cache import ModelCache, ModelFacts, ModelQuery
from kvist_operator.reconcile.picker_client import PickerClient
from kvist_operator.reconcile.reconciler import Reconciler
from kvist_operator.spec.pool import Pool
from kvist_operator.status.advice import standing

KEY = PoolKey("forest", "twig")


class Quiet(PickerClient):
    """Picker figures that the test sets."""

    def __init__(self) -> None:
        self.priced: list[tuple[int, int]] = []
        self.tokens: int | None = None

    async def set_deletion_costs(self, pool: Pool, pods: list[Json], replicas: int) -> None:
        """Record the call and the number of replicas."""
        self.priced.append((len(pods), replicas))

    def kv_tokens(self, key: PoolKey) -> int | None:
        """Return the size that the test sets."""
        return self.tokens

    def advice(self, key: PoolKey, pool: Pool, plan: Plan, before: list[str]) -> tuple[str, ...]:
        """Return the earlier advice."""
        return standing(before)


class Ground:
    """One pool in one cluster, and an operator that can be restarted."""

    def __init__(self) -> None:
        self.cluster = Memory()
        self.cluster.absent = {kind for kind in CHILDREN if kind.optional}
        self.pickers = Quiet()
        self.now = datetime(2026, 11, 23, 12, tzinfo=UTC)
        self.restart()

    def restart(
        self,
        *,
        build: str = "1",
        engine_image: str = "vllm/vllm-openai:v0.32.0",
        release: str = "",
        look_up: Callable[[ModelQuery], ModelFacts] = lambda query: (model_facts(query.model), None),
    ) -> None:
        """Make an operator of this build with an empty cache."""
        self.cache = PoolCache()
        self.capabilities = Capabilities(self.cluster, nodes_allowed=True)
        self.informer = PoolInformer(self.cluster, self.cache, (), lambda _key: None)
        self.presets = Presets(self.cluster, home="kvist-system")
        self.reconciler = Reconciler(
            cluster=self.cluster,
            cache=self.cache,
            capabilities=self.capabilities,
            models=ModelCache(lambda: None, look_up),
            pickers=self.pickers,
            presets=self.presets,
            images=Site(),
            engine_image=engine_image,
            identity=build,
            release=release,
            now=lambda: self.now,
        )

    def put(self, **spec: Any) -> None:
        """Create or change the pool."""
        base = {
            "model": {"source": "hf://Qwen/Qwen3-8B"},
            "accelerator": {"product": "L4"},
            "replicas": 0,
        }
        meta = {"name": "twig", "namespace": "forest"}
        body = {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "metadata": meta}
        self.cluster.put({**body, "spec": {**base, **spec}})

    def annotate(self, annotations: dict[str, str]) -> None:
        """Set annotations of the pool."""
        found = self.cluster.objects[KEY.target]
        found["metadata"]["annotations"] = annotations
        self.cluster.put(found)

    async def look(self) -> float | None:
        """Resync and reconcile once; writes are counted from here."""
        await self.informer.follow((await self.capabilities.discover()).kinds)
        await self.informer.resync()
        await self.presets.refresh()
        self.cluster.writes.clear()
        return await self.reconciler.reconcile(KEY)

    async def said(self, kind: str) -> Json:
        """Return a condition."""
        conditions = (await self.status())["conditions"]
        return next((c for c in conditions if c["type"] == kind), {})

    async def status(self) -> Json:
        """Return the pool's status."""
        found = await self.cluster.get(KEY.target)
        assert found is not None
        status: Json = found["status"]
        return status

    async def engines(self) -> Json:
        """Return the Deployment of the engines."""
        found = await self.cluster.get(Target(DEPLOYMENT, "forest", "twig"))
        assert found is not None
        return found
