"""A small training of a model of another package, by R = 4 replicas: python train_others.py MODEL DEVICES."""

import sys
import tempfile
import warnings

import unisono as un

# isort: split
import keras
import numpy as np

RNG = np.random.default_rng(0)
ROWS = 16
BATCH = 8
CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IMAGES = RNG.normal(size=(ROWS, 8, 8, 3)).astype("float32")
TOKENS = RNG.integers(1, 32, (ROWS, 6))


def fit(model, x, y, loss, **options):
    """Return the model and its losses."""
    model.compile(keras.optimizers.AdamW(0.01), loss, **options)
    return model, model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history["loss"]


def fit_next_words(model, is_word):
    return fit(model, {"token_ids": TOKENS, "padding_mask": is_word}, np.roll(TOKENS, -1, 1), CLASSES)


def train_vit(_):
    import keras_hub

    backbone = keras_hub.models.ViTBackbone((8, 8, 3), patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)
    return fit(
        keras_hub.models.ViTImageClassifier(backbone, num_classes=3, preprocessor=None), IMAGES, RNG.integers(0, 3, ROWS), CLASSES
    )


def train_bert(_):
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=32, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8, max_sequence_length=6
    )
    x = {"token_ids": TOKENS, "segment_ids": 0 * TOKENS, "padding_mask": TOKENS > 4}
    return fit(
        keras_hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None), x, RNG.integers(0, 3, ROWS), CLASSES
    )


def train_gpt2(_):
    """With low-rank adapters."""
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=32, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8, max_sequence_length=6
    )
    backbone.enable_lora(2)
    return fit_next_words(keras_hub.models.GPT2CausalLM(backbone, preprocessor=None), TOKENS > 4)


def train_llama(_):
    """Two decoders with low-rank adapters, of which all else is frozen: on several devices it lies cut."""
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=128, num_layers=2, num_query_heads=4, num_key_value_heads=2, hidden_dim=64, intermediate_dim=192
    )
    backbone.enable_lora(4)
    return fit_next_words(keras_hub.models.LlamaCausalLM(backbone, preprocessor=None), TOKENS > 0)


def train_qwen_moe(_):
    import keras_hub

    widths = {"hidden_dim": 8, "intermediate_dim": 8, "moe_intermediate_dim": 8, "shared_expert_intermediate_dim": 8}
    heads = {"num_query_heads": 2, "num_key_value_heads": 2, "num_experts": 2, "top_k": 1}
    backbone = keras_hub.models.QwenMoeBackbone(vocabulary_size=32, num_layers=1, **widths, **heads)
    return fit_next_words(keras_hub.models.QwenMoeCausalLM(backbone, preprocessor=None), TOKENS > 0)


def train_clip(_):
    """Each picture of a batch is compared with each of its texts."""
    import keras_hub

    widths = {"hidden_dim": 8, "intermediate_dim": 8, "num_layers": 1, "num_heads": 2}
    pictures = keras_hub.models.CLIPVisionEncoder(patch_size=4, image_shape=(8, 8, 3), **widths)
    texts = keras_hub.models.CLIPTextEncoder(vocabulary_size=32, embedding_dim=8, max_sequence_length=6, **widths)
    numbers = np.arange(ROWS) % BATCH
    y, loss = ({f"{kind}_logits": value for kind in ("vision", "text")} for value in (numbers, CLASSES))
    return fit(keras_hub.models.CLIPBackbone(pictures, texts, projection_dim=4), {"images": IMAGES, "token_ids": TOKENS}, y, loss)


def train_bayesflow(_):
    import bayesflow

    adapter = bayesflow.Adapter().convert_dtype("float64", "float32").rename("theta", "inference_variables")
    workflow = bayesflow.BasicWorkflow(
        adapter=adapter.rename("x", "inference_conditions"),
        inference_network=bayesflow.networks.CouplingFlow(depth=1, subnet_kwargs={"widths": (8,)}),
    )
    data = {"theta": RNG.normal(size=(ROWS, 2)), "x": RNG.normal(size=(ROWS, 3))}
    losses = workflow.fit_offline(data, epochs=2, batch_size=BATCH, verbose=0).history["loss"]
    return workflow.approximator, losses


def train_keras_rs(_):
    """The scores of most lists are tied."""
    import keras_rs

    x, y = np.round(RNG.normal(size=(ROWS, 5, 3))).astype("float32"), RNG.integers(-1, 4, (ROWS, 5)).astype("float32")
    inputs = keras.Input((5, 3))
    scores = keras.ops.squeeze(keras.layers.Dense(1, kernel_initializer="ones")(inputs), -1)
    metrics = [keras_rs.metrics.NDCG(k=3), keras_rs.metrics.MeanReciprocalRank()]
    return fit(keras.Model(inputs, scores), x, y, keras_rs.losses.PairwiseHingeLoss(), metrics=metrics)


def train_keras_tuner(strategy):
    """The best model of a search."""
    import keras_tuner

    def build(parameters):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(parameters.Int("units", 2, 4)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    x, y = RNG.normal(size=(ROWS, 3)), RNG.normal(size=(ROWS, 1))
    with tempfile.TemporaryDirectory() as folder:
        options = {"objective": "val_loss", "max_trials": 2, "seed": 0, "directory": folder, "distribution_strategy": strategy}
        tuner = keras_tuner.RandomSearch(build, **options)
        tuner.search(x, y, batch_size=BATCH, validation_data=(x, y), verbose=0)
        (model,) = tuner.get_best_models()
        losses = [trial.score for trial in tuner.oracle.get_best_trials(2)]
    return model, losses


if __name__ == "__main__":
    name, devices = sys.argv[1], int(sys.argv[2])
    keras.utils.set_random_seed(3)
    shard = "frozen" if name == "llama" and devices > 1 else None
    strategy = un.MirroredStrategy(devices=devices, replicas=4, shard=shard) if devices > 1 else un.OneDeviceStrategy(replicas=4)
    warnings.simplefilter("ignore")
    with strategy.scope():
        model, losses = globals()[f"train_{name}"](strategy)
    assert np.all(np.isfinite(losses)), losses
    print(un.fingerprint(model))
