"""Mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899) of a batch, on the device: images and their soft targets."""

import jax
import jax.numpy as jnp


def mix(batch, key, mixup=0.0, cutmix=0.0, switch=0.5):
    """Each row with its neighbour: rows 2k and 2k + 1 are partners, so nothing travels between devices that hold whole
    pairs. One λ ~ Beta(α, α) and one box for the batch, as in the published recipes.

    mixup: λ·image + (1 − λ)·partner. cutmix: the partner's pixels in a box of sides √(1 − λ), cut at the rim, and λ set
    to the share of pixels that stay. Where both α are above 0: cutmix with probability `switch`.
    batch: image [B, [frames,] h, w, 3], label [B], … -> with other [B], the partner's label, and share [B], λ of the
    own one."""
    image = batch["image"]
    cutting, drawn, place = jax.random.split(key, 3)
    cut = jax.random.uniform(cutting) < (switch if mixup and cutmix else 1.0 if cutmix else 0.0)
    alpha = jnp.where(cut, cutmix or 1.0, mixup or 1.0)
    lam = jax.random.beta(drawn, alpha, alpha)
    at = jax.random.uniform(place, (2,))
    image, lam = blended(image, cut, lam, at)
    share = jnp.broadcast_to(lam, batch["label"].shape)
    return batch | {"image": image, "other": partner(batch["label"]), "share": share}


def partner(x):
    """Rows 2k and 2k + 1 changed for each other."""
    return x.reshape(-1, 2, *x.shape[1:])[:, ::-1].reshape(x.shape)


def blended(image, cut, lam, at):
    """(image, λ) after cutmix where `cut`, else after mixup; at: the box's centre, in sides of the image, 0 … 1."""
    inside = jnp.ones((), bool)
    for axis, n in enumerate(image.shape[-3:-1]):
        side = jnp.floor(n * jnp.sqrt(1 - lam)).astype(jnp.int32)
        centre = jnp.floor(n * at[axis]).astype(jnp.int32)
        site = jnp.arange(n)
        along = (site >= centre - side // 2) & (site < centre + (side + 1) // 2)
        inside = inside & jnp.expand_dims(along, 1 - axis)
    lam = jnp.where(cut, 1 - inside.mean(), lam)
    own = jnp.where(cut, ~inside[..., None], lam).astype(image.dtype)
    return own * image + (1 - own) * partner(image), lam
