"""Every key that a run has, with its default and meaning, and what may stand behind the colon of `--config F.py:arg`.

A config file builds on `lm()` or `vit()`, changes what it needs, and returns `finish(config, ...)`.
`config.encoding` stays open (its options belong to the encoding's module); everything else is locked.
"""

from ml_collections import ConfigDict

from configs.encodings import preset


def parse(arg: str | None, **defaults):
    """'encoding=rope,seed=1,smoke' -> ConfigDict with the types of `defaults`; a bare key means True."""
    out = dict(encoding="", seed=0, smoke=False) | defaults
    for item in filter(None, (arg or "").split(",")):
        key, _, text = item.partition("=")
        if key not in out:
            raise ValueError(f"config argument {key!r}: this config has {', '.join(sorted(out))}")
        kind = type(out[key])
        try:
            out[key] = {"": True, "true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            raise ValueError(f"config argument {item!r}: {key} wants {kind.__name__}") from None
    return ConfigDict(out)


def _shared() -> ConfigDict:
    c = ConfigDict()
    c.seed = 0  # parameters, data order, augmentation, dropout
    c.steps = 1000  # optimiser steps
    c.batch_size = 32  # of all devices and accumulation steps together
    c.dtype = "float32"  # of activations: float32 | bfloat16 | float64 (with JAX_ENABLE_X64=1); parameters are float32
    c.attention = "auto"  # auto | xla | chunked | cudnn (NVIDIA GPUs, bfloat16) | splash (TPUs)
    c.encoding = ConfigDict({"name": "none"})
    c.optim = ConfigDict(
        dict(
            name="adamw",  # adamw | lamb
            lr=1e-3,
            schedule="cosine",  # cosine | linear | constant, after the warm-up
            warmup_steps=0,
            end_lr_fraction=0.0,
            weight_decay=0.1,
            clip=1.0,  # global gradient norm; 0 = off
            b1=0.9,
            b2=0.999,
            eps=1e-8,
            encoding_lr=1.0,  # multiplies lr for the encoding's parameters
            encoding_decay=False,  # weight decay on the encoding's parameters
            decay_norm_bias=False,  # weight decay on norms and biases too
            accumulate=1,  # micro-batches a step
            ema=0.0,  # decay of an average of the parameters; 0 = off
        )
    )
    c.checkpoint = ConfigDict(dict(every_steps=500, keep=2))
    c.log = ConfigDict(dict(every_steps=50))
    c.mesh = ConfigDict(  # sizes that multiply to the devices; -1 = the remaining ones
        dict(
            data=-1,  # splits rows
            fsdp=1,  # splits rows, and large parameters
            tensor=1,  # splits heads, MLP units, vocabulary; must divide model.heads, model.kv_heads, the MLP's width
            sequence=1,  # lm only: splits the sites of a row; must divide data.length and eval.lengths
        )
    )
    c.stages = ()  # of staged training: dicts of steps, encoding, lr, encoding_lr, reset_optimizer (jojax/stages.py)
    c.init_from = ""  # a workdir or checkpoint: start from its parameters only
    c.resume = ""  # a workdir: start from its whole state
    return c


def _model(kind, **more) -> ConfigDict:
    return ConfigDict(
        dict(
            kind=kind,
            width=128,
            depth=2,
            heads=4,
            kv_heads=0,  # 0 = heads
            head_dim=0,  # 0 = width / heads
            mixer="attention",  # attention | recurrence (lm only: a gated linear recurrence)
            mlp_ratio=4.0,
            mlp="gelu",  # gelu | swiglu
            norm="layernorm",  # layernorm | rmsnorm
            qk_norm="none",  # none | before | after transport
            window=0,  # a causal site sees the last so many, itself among them; others those less than so far; 0 = all
            kv_shift=False,  # keys and values mixed with those of the site before
            bias=True,
            eps=1e-5,
            dropout=0.0,
            layer_scale=0.0,  # start of a learned gain a channel on every branch; 0 = none
            init_std=0.02,
            scan=True,  # blocks as one scanned body: compiles once
            remat=False,  # recompute activations in the backward pass
        )
        | more
    )


def lm(**data) -> ConfigDict:
    c = _shared()
    # match_jo_projected: an MLP so much wider that the parameters are as many as jo_projected's
    c.model = _model("lm", tied=False, head_bias=True, loss_chunk=512, match_jo_projected=False)
    c.data = ConfigDict(
        dict(
            source="wikipedia_excerpt",  # wikipedia_excerpt | text | tokens | probe (generated)
            name="",  # probe: passkey | recall | copy (jojax/data/probes.py)
            path="",  # tokens: a folder that scripts/prepare_data.py made
            train_path="",  # text: .jsonl(.xz|.gz), .txt, or a folder of .txt
            valid_path="",
            length=256,  # training length in tokens
            tokenizer="bpe",  # bpe (trained on the train split) | bytes | a tokenizer.json; tokens bring their own
            vocab=2048,
            cache="",  # folder for tokenised text; "" = ~/.cache/jojax
        )
        | data
    )
    c.eval = ConfigDict(
        dict(
            every_steps=0,  # exact loss of the valid split; 0 = at the end only
            batch_size=16,
            lengths=(),  # extrapolation at the end of the run
            document_tokens=0,  # > 0: evaluate the first so many predictions of each document only
            tokens_per_batch=16_384,  # of the extrapolation's batches
            diagnostics=4,  # rows that the numbers about attention at the end of the run are taken from; 0 = none
        )
    )
    return c


def shards(name: str) -> dict:
    """A corpus too large for text files: token shards, `--config.data.path=DIR`."""
    return dict(source="tokens", path=f"data/tokens/{name}")


def vit(**data) -> ConfigDict:
    c = _shared()
    c.model = _model("vit", patch=4, patch_frames=0, pool="cls", drop_path=0.0)  # patch_frames: of clips; 0 = 1
    c.data = ConfigDict(
        dict(
            source="fashion_mnist",  # fashion_mnist | tfds | folder
            path="",  # tfds: data_dir; folder: the root of train/ and the valid split
            name="",  # tfds: the data set
            train_split="train",
            valid_split="valid",  # valid: the first that there is of valid, validation, val, test
            classes=10,
            image_size=32,
            frames=0,  # > 0: clips of so many frames (source folder: split/class/video/frame.jpg)
            frame_stride=0,  # frames of the video from one of a clip to the next; 0 = 1
            crop="pad4",  # pad4 | inception | cover (a window of the image resized to 1.1 times it) | none
            crop_ratio=0.875,  # what evaluation keeps of each side; of inception and cover
            flip=True,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            label_smoothing=0.0,
            loss="softmax",  # softmax | sigmoid (binary cross-entropy, mean over the classes)
            mixed_targets="share",  # of sigmoid with mixup or cutmix: share of each label | both 1
            augment=dict(
                rand="",  # RandAugment: rand-m9-mstd0.5-inc1 (timm's) | torchvision-m9-n2
                three=False,  # 3-Augment
                jitter=0.0,  # of brightness, contrast, saturation
                erase=0.0,  # probability
                erase_fill="noise",  # noise | mean
                cutout=0,  # side in pixels
                mixup=0.0,  # α; 0 = off
                cutmix=0.0,
                switch=0.5,  # how often cutmix, where both are on
                repeat=1,  # times that an example stands in its batch, each augmented on its own
            ),
        )
        | data
    )
    c.eval = ConfigDict(
        dict(
            every_steps=0,  # exact scores of the valid split; 0 = at the end only
            batch_size=128,
            resolutions=(),  # other image sizes, zero-shot, at the end of the run
            offsets=(),  # there: added to all coordinates, in patches; () = none
            diagnostics=4,  # images, as in lm()
        )
    )
    return c


def content_angles(name: str) -> bool:
    """Does the preset learn step angles from content? Their errors add up along the path: they want a lower rate."""
    options = preset(name.partition("+")[0])
    return options["name"] in ("joformer", "jo_blocks", "householder") and options.get("angle_source") != "position"


def finish(config: ConfigDict, arg: ConfigDict, encoding: str) -> ConfigDict:
    """Put in the preset and the seed, lock."""
    name = arg.encoding or encoding
    config.encoding = ConfigDict({"preset": name, **preset(name)})  # the name is for tables
    config.seed = arg.seed
    if name.startswith("rope_matched"):
        if config.model.kind != "lm":
            raise ValueError("rope_matched has jo_projected's parameters, which a vision model cannot have")
        config.model.match_jo_projected = True
    config.lock()
    config.encoding.unlock()
    return config
