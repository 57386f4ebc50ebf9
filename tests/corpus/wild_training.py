"""Training steps as people write them: `nnx.Optimizer` and optax, metrics, mixed precision, LoRA, accumulation, EMA."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state
from healthy import FLAX, WIDTH, Case, assign, node_list, numbers, rngs
from wild_cases import WILD, X, subject

CLASSES = 4


class Mlp(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        widths = [(WIDTH, 2 * WIDTH), (2 * WIDTH, CLASSES)]
        self.layers = node_list(nnx.Linear(*width, param_dtype=dtype, dtype=dtype, rngs=rngs) for width in widths)

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.layers[0](x)))


class Attention(nnx.Module):
    """An attention block with norms and dropout, averaged over the sequence."""

    def __init__(self, rngs):
        self.before = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.mlp = Mlp(rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.before(x)))
        return self.mlp(x).mean(1)


class ConvNet(nnx.Module):
    """BatchNorm and dropout."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.inner(x)))))


def make_optimizer(model, tx, wrt=nnx.Param):
    """`nnx.Optimizer` in the spelling of the installed flax: before 0.11 it also holds the model."""
    return nnx.Optimizer(model, tx, wrt=wrt)


def apply_gradients(optimizer, model, gradients):
    """From flax 0.11 on the optimizer is handed the model."""
    if FLAX >= (0, 11):
        optimizer.update(model, gradients)
    else:
        optimizer.update(gradients)


def optimizer_of(model, tx=None, wrt=nnx.Param):
    return model, make_optimizer(model, tx or optax.adam(1e-3), wrt)


def metrics_of():
    return nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))


def batch_of(shape=(3, WIDTH)):
    return {"x": numbers(shape), "y": jnp.arange(shape[0]) % CLASSES}


def loss_of(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), logits


def step_of(wrt=nnx.Param):
    """The step without metrics."""

    def train_step(model, optimizer, batch):
        state = nnx.DiffState(0, wrt)
        (loss, _), gradients = nnx.value_and_grad(loss_of, argnums=state, has_aux=True)(model, batch)
        apply_gradients(optimizer, model, gradients)
        return loss

    return train_step


def train_step(model, optimizer, metrics, batch):
    (loss, logits), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["y"])
    apply_gradients(optimizer, model, gradients)
    return loss


TRAINING: dict[str, Callable[[], Case]] = {}


def training(factory: Callable[[], Case]) -> Callable[[], Case]:
    TRAINING[factory.__name__] = factory
    return subject(factory)


@training
def mlp_and_adam():
    return Case(train_step, (*optimizer_of(Mlp(rngs())), metrics_of(), batch_of()))


@training
def attention_and_adam():
    return Case(train_step, (*optimizer_of(Attention(rngs())), metrics_of(), batch_of((2, 4, WIDTH))))


@training
def batch_norm_and_dropout():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 10)))
    return Case(train_step, (*optimizer_of(ConvNet(rngs()), tx), metrics_of(), batch_of()))


@training
def accumulated_gradients():
    tx = optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2)
    return Case(step_of(), (*optimizer_of(Mlp(rngs()), tx), batch_of()))


@training
def microbatches():
    def step(model, optimizer, batch):
        def one(total, part):
            gradients = nnx.grad(lambda model: loss_of(model, part)[0])(model)
            return jax.tree.map(jnp.add, total, gradients), None

        parts = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), batch)
        first = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        total = first
        for index in range(2):
            total, _ = one(total, jax.tree.map(lambda leaf, index=index: leaf[index], parts))
        apply_gradients(optimizer, model, total)

    return Case(step, (*optimizer_of(Mlp(rngs())), batch_of((4, WIDTH))))


@training
def ema_weights():
    def step(model, ema, optimizer, batch):
        loss = step_of()(model, optimizer, batch)
        old, new = nnx.state(ema, nnx.Param), nnx.state(model, nnx.Param)
        nnx.update(ema, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, old, new))
        return loss

    model, optimizer = optimizer_of(Mlp(rngs()))
    return Case(step, (model, Mlp(rngs()), optimizer, batch_of()))


@training
def bfloat16_parameters():
    return Case(step_of(), (*optimizer_of(Mlp(rngs(), jnp.bfloat16)), batch_of()))


@training
def lora_parameters():
    class Lora(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.LoRALinear(WIDTH, CLASSES, lora_rank=2, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    return Case(step_of(nnx.LoRAParam), (*optimizer_of(Lora(rngs()), wrt=nnx.LoRAParam), batch_of()))


@training
def injected_hyperparameters():
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)
    return Case(step_of(), (*optimizer_of(Mlp(rngs()), tx), batch_of()))


@training
def rngs_beside_the_model():
    def step(model, optimizer, rngs, batch):
        noisy = {**batch, "x": batch["x"] + jax.random.normal(rngs.noise(), batch["x"].shape)}
        return step_of()(model, optimizer, noisy)

    return Case(step, (*optimizer_of(Mlp(rngs())), nnx.Rngs(noise=1), batch_of()))


@training
def metrics_reset_and_computed():
    def evaluate(model, metrics, batch):
        metrics.reset()
        loss, logits = loss_of(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["y"])
        return metrics.compute()

    return Case(evaluate, (Mlp(rngs()), metrics_of(), batch_of()))


@training
def evaluation_with_the_optimizer():
    """Reads the optimizer for the log, and updates nothing."""

    def evaluate(model, optimizer, metrics, batch):
        loss, logits = loss_of(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["y"])
        return loss, optimizer.step[...], jax.tree.map(jnp.sum, nnx.state(optimizer, nnx.optimizer.OptState))

    return Case(evaluate, (*optimizer_of(Mlp(rngs())), metrics_of(), batch_of()))


def functional_step(tx):
    """The step of a functional loop: states in, states out."""

    def step(graphdef, params, opt_state, batch):
        def loss(params):
            return loss_of(nnx.merge(graphdef, params), batch)[0]

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def functional_args(tx, model=None):
    graphdef, params = nnx.split(model or Mlp(rngs()))
    return graphdef, params, tx.init(params), batch_of()


@training
def functional_adam():
    tx = optax.adam(1e-3)
    return Case(functional_step(tx), functional_args(tx))


@training
def split_inside_and_merged():
    """The jax form of the documentation: one state of model and optimizer through `jax.jit`."""

    def step(graphdef, state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        loss = step_of()(model, optimizer, batch)
        return loss, nnx.state((model, optimizer))

    return Case(step, (*nnx.split(optimizer_of(Mlp(rngs()))), batch_of()))


@training
def sgd_by_hand():
    def step(model, batch, learning_rate):
        loss, gradients = nnx.value_and_grad(lambda model: loss_of(model, batch)[0])(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients))
        return loss

    return Case(step, (Mlp(rngs()), batch_of(), 0.1))


if hasattr(nnx, "ModelAndOptimizer"):

    @training
    def model_and_optimizer():
        def step(optimizer, batch):
            loss, gradients = nnx.value_and_grad(lambda model: loss_of(model, batch)[0])(optimizer.model)
            optimizer.update(gradients)
            return loss

        return Case(step, (nnx.ModelAndOptimizer(Mlp(rngs()), optax.adam(1e-3)), batch_of()))


@training
def loss_scaling():
    """A running value beside the model, changed under a condition on the data."""

    def step(model, scale, batch):
        loss, gradients = nnx.value_and_grad(lambda model: loss_of(model, batch)[0] * scale[...])(model)
        finite = jnp.all(jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients)]))
        assign(scale, jnp.where(finite, scale[...] * 2, scale[...] / 2))
        return jax.lax.cond(finite, lambda: loss, lambda: jnp.zeros_like(loss))

    return Case(step, (Mlp(rngs()), nnx.Variable(jnp.float32(2.0)), batch_of()))


@training
def train_state_of_linen_habits():
    """Only the state of the loop, and the graph in its closure."""
    graphdef, params = nnx.split(Mlp(rngs()))
    state = train_state.TrainState.create(
        apply_fn=lambda params, x: nnx.merge(graphdef, params)(x), params=params, tx=optax.adam(1e-3)
    )

    def step(state, batch):
        def loss(params):
            logits = state.apply_fn(params, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    return Case(step, (state, batch_of()), settings={"donate": "state,state"})


# --- trainers


class Trainer:
    """No graph node: a plain object that holds the model, its optimizer and a history of Python numbers."""

    def __init__(self, tied=False):
        self.model, self.optimizer = optimizer_of(Mlp(rngs()))
        self.models = {"eval": self.model, "ema": Mlp(rngs())}
        self.calls = 0
        self.names = ["loss"]
        self.step_fn = step_of()

    def step(self, batch):
        self.calls += 1
        return {name: self.step_fn(self.model, self.optimizer, batch) for name in self.names}

    def __call__(self, x):
        return self.models["eval"](x) - self.models["ema"](x)


WILD |= {
    "method_of_a_trainer": lambda: Case(Trainer().step, (batch_of(),)),
    "callable_object_that_holds_models": lambda: Case(Trainer(), (numbers(X),)),
    "trainer_as_argument": lambda: Case(lambda trainer, batch: trainer.step(batch), (Trainer(), batch_of())),
}


@dataclasses.dataclass
class TrainState:
    model: Any
    optimizer: Any
    ema: Any = None
    epoch: int = 0


@subject
def train_state_as_plain_dataclass():
    def step(state, batch):
        return step_of()(state.model, state.optimizer, batch)

    return Case(step, (TrainState(*optimizer_of(Mlp(rngs()))), batch_of()))


# --- a step for tests that need any


def step_on_squares(model, optimizer, x):
    """Without labels: the mean of the squares of what the model returns becomes smaller."""
    loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    apply_gradients(optimizer, model, gradients)
    return loss
