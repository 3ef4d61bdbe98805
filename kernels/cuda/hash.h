/*
 * XXH3-64, seed 0, of pages of up to 4 KiB: the part of a block's content hash that reads the values.
 * Written from xxHash's specification (doc/xxhash_spec.md of https://github.com/Cyan4973/xxHash, version
 * 0.2.0, "XXH3 Algorithm Overview"). Tests compare it with the library that the host uses. For pages longer
 * than 240 bytes eight threads each have one of the eight accumulators.
 */
#ifndef KERNELS_CUDA_HASH_H
#define KERNELS_CUDA_HASH_H

#include "kernels/cuda/launch.h"

#define XXH_PRIME32_1 UINT64_C(0x9E3779B1)
#define XXH_PRIME32_2 UINT64_C(0x85EBCA77)
#define XXH_PRIME32_3 UINT64_C(0xC2B2AE3D)
#define XXH_PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define XXH_PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define XXH_PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define XXH_PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define XXH_PRIME64_5 UINT64_C(0x27D4EB2F165667C5)
#define XXH_PRIME_MX1 UINT64_C(0x165667919E3779F9)
#define XXH_PRIME_MX2 UINT64_C(0x9FB21C651E98DF25)

#define HASH_LANES  8u
#define HASH_STRIPE 64u
#define HASH_SHORT  240u /* largest size, in bytes, that one thread hashes alone */
#define HASH_BLOCK  16u  /* stripes between two scrambles: (192 - 64) / 8 */
#define HASH_SECRET 24u  /* words */
#define HASH_GROUPS (LAUNCH_THREADS / HASH_LANES)

/* The 192 bytes of the default secret, as little-endian words. */
DEVICE_CONST uint64_t hash_secret[HASH_SECRET] = {
    UINT64_C(0xbe4ba423396cfeb8), UINT64_C(0x1cad21f72c81017c), UINT64_C(0xdb979083e96dd4de),
    UINT64_C(0x1f67b3b7a4a44072), UINT64_C(0x78e5c0cc4ee679cb), UINT64_C(0x2172ffcc7dd05a82),
    UINT64_C(0x8e2443f7744608b8), UINT64_C(0x4c263a81e69035e0), UINT64_C(0xcb00c391bb52283c),
    UINT64_C(0xa32e531b8b65d088), UINT64_C(0x4ef90da297486471), UINT64_C(0xd8acdea946ef1938),
    UINT64_C(0x3f349ce33f76faa8), UINT64_C(0x1d4f0bc7c7bbdcf9), UINT64_C(0x3159b4cd4be0518a),
    UINT64_C(0x647378d9c97e9fc8), UINT64_C(0xc3ebd33483acc5ea), UINT64_C(0xeb6313faffa081c5),
    UINT64_C(0x49daf0b751dd0d17), UINT64_C(0x9e68d429265516d3), UINT64_C(0xfca1477d58be162b),
    UINT64_C(0xce31d07ad1b8f88f), UINT64_C(0x280416958f3acb45), UINT64_C(0x7e404bbbcafbd7af)};

/* ---- words ---- */

/* Eight bytes of the secret, from any offset. */
DEVICE_FN uint64_t hash_secret_at(uint32_t at) {
    uint32_t shift = at % 8 * 8;
    uint64_t low = hash_secret[at / 8] >> shift;
    return shift ? low | hash_secret[at / 8 + 1] << (64 - shift) : low;
}
DEVICE_FN uint64_t hash_byte(const uint8_t *from) {
    return *from;
}
DEVICE_FN uint64_t hash_load32(const uint8_t *from) {
    return hash_byte(from) | hash_byte(from + 1) << 8 | hash_byte(from + 2) << 16 | hash_byte(from + 3) << 24;
}
DEVICE_FN uint64_t hash_load64(const uint8_t *from) {
    return hash_load32(from) | hash_load32(from + 4) << 32;
}
/* Makes as few accesses as the address allows. */
DEVICE_FN uint64_t hash_word(const uint8_t *from) {
    if ((uintptr_t)from % 8 == 0) {
        return *(const uint64_t *)(const void *)from;
    }
    if ((uintptr_t)from % 4 == 0) {
        const uint32_t *half = (const uint32_t *)(const void *)from;
        return half[0] | (uint64_t)half[1] << 32;
    }
    return hash_load64(from);
}
DEVICE_FN uint64_t hash_swap(uint64_t v) {
    v = (v & UINT64_C(0x00ff00ff00ff00ff)) << 8 | (v >> 8 & UINT64_C(0x00ff00ff00ff00ff));
    v = (v & UINT64_C(0x0000ffff0000ffff)) << 16 | (v >> 16 & UINT64_C(0x0000ffff0000ffff));
    return v << 32 | v >> 32;
}
DEVICE_FN uint64_t hash_rotate(uint64_t v, uint32_t by) {
    return v << by | v >> (64 - by);
}
/* Multiplies, and xors the halves of the product. */
DEVICE_FN uint64_t hash_fold(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
    return (a * b) ^ __umul64hi(a, b);
#else
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#endif
}
DEVICE_FN uint64_t hash_avalanche(uint64_t v) {
    v ^= v >> 37;
    v *= XXH_PRIME_MX1;
    return v ^ v >> 32;
}
/* The avalanche of XXH64. */
DEVICE_FN uint64_t hash_avalanche_64(uint64_t v) {
    v ^= v >> 33;
    v *= XXH_PRIME64_2;
    v ^= v >> 29;
    v *= XXH_PRIME64_3;
    return v ^ v >> 32;
}

/* ---- short pages ---- */

DEVICE_FN uint64_t hash_to_16(const uint8_t *p, uint32_t n) {
    if (n == 0) {
        return hash_avalanche_64(hash_secret_at(56) ^ hash_secret_at(64));
    }
    if (n < 4) {
        uint64_t all =
            hash_byte(p) << 16 | hash_byte(p + n / 2) << 24 | hash_byte(p + n - 1) | (uint64_t)n << 8;
        uint64_t key = (hash_secret_at(0) ^ hash_secret_at(0) >> 32) & UINT64_C(0xffffffff);
        return hash_avalanche_64(all ^ key);
    }
    if (n <= 8) {
        uint64_t v = (hash_load32(p + n - 4) | hash_load32(p) << 32) ^ hash_secret_at(8) ^ hash_secret_at(16);
        v ^= hash_rotate(v, 49) ^ hash_rotate(v, 24);
        v *= XXH_PRIME_MX2;
        v ^= (v >> 35) + n;
        v *= XXH_PRIME_MX2;
        return v ^ v >> 28;
    }
    uint64_t low = hash_load64(p) ^ hash_secret_at(24) ^ hash_secret_at(32);
    uint64_t high = hash_load64(p + n - 8) ^ hash_secret_at(40) ^ hash_secret_at(48);
    return hash_avalanche(n + hash_swap(low) + high + hash_fold(low, high));
}

DEVICE_FN uint64_t hash_mix_16(const uint8_t *p, uint32_t secret) {
    return hash_fold(hash_load64(p) ^ hash_secret_at(secret),
                     hash_load64(p + 8) ^ hash_secret_at(secret + 8));
}

DEVICE_FN uint64_t hash_to_240(const uint8_t *p, uint32_t n) {
    uint64_t sum = n * XXH_PRIME64_1;
    if (n <= 128) {
        for (uint32_t i = (n - 1) / 32 + 1; i-- > 0;) {
            sum += hash_mix_16(p + 16 * i, 32 * i) + hash_mix_16(p + n - 16 * (i + 1), 32 * i + 16);
        }
        return hash_avalanche(sum);
    }
    for (uint32_t i = 0; i < 8; i++) {
        sum += hash_mix_16(p + 16 * i, 16 * i);
    }
    sum = hash_avalanche(sum);
    for (uint32_t i = 8; i < n / 16; i++) {
        sum += hash_mix_16(p + 16 * i, 16 * (i - 8) + 3);
    }
    return hash_avalanche(sum + hash_mix_16(p + n - 16, 136 - 17));
}

/* ---- long pages ---- */

/* Initial values of the accumulators. */
DEVICE_CONST uint64_t hash_start[HASH_LANES] = {XXH_PRIME32_3, XXH_PRIME64_1, XXH_PRIME64_2, XXH_PRIME64_3,
                                                XXH_PRIME64_4, XXH_PRIME32_2, XXH_PRIME64_5, XXH_PRIME32_1};

/* A lane's part of a stripe: its own word, and its neighbour's. */
DEVICE_FN uint64_t hash_stripe(uint64_t lane, uint64_t own, uint64_t other, uint64_t secret) {
    uint64_t keyed = own ^ secret;
    return lane + other + (keyed & UINT64_C(0xffffffff)) * (keyed >> 32);
}

/*
 * secret: a copy of hash_secret that lanes read in parallel; from constant memory they would read one after
 * the other.
 */
DEVICE_FN uint64_t hash_lane(const uint8_t *p, uint32_t n, uint32_t lane, const uint64_t *secret) {
    const uint32_t stripes = (n - 1) / HASH_STRIPE;
    uint64_t sum = hash_start[lane];
    for (uint32_t i = 0; i < stripes; i++) {
        const uint8_t *stripe = p + i * HASH_STRIPE;
        uint64_t own = hash_word(stripe + 8 * lane), other = hash_word(stripe + 8 * (lane ^ 1));
        sum = hash_stripe(sum, own, other, secret[i % HASH_BLOCK + lane]);
        if (i % HASH_BLOCK == HASH_BLOCK - 1) {
            sum = (sum ^ sum >> 47 ^ secret[16 + lane]) * XXH_PRIME32_1;
        }
    }
    const uint8_t *last = p + n - HASH_STRIPE;
    return hash_stripe(sum, hash_load64(last + 8 * lane), hash_load64(last + 8 * (lane ^ 1)),
                       hash_secret_at(192 - 64 - 7 + 8 * lane));
}

DEVICE_FN uint64_t hash_merge(const uint64_t lanes[HASH_LANES], uint32_t n) {
    uint64_t sum = n * XXH_PRIME64_1;
    for (uint32_t i = 0; i < HASH_LANES; i += 2) {
        sum +=
            hash_fold(lanes[i] ^ hash_secret_at(11 + 8 * i), lanes[i + 1] ^ hash_secret_at(11 + 8 * i + 8));
    }
    return hash_avalanche(sum);
}

/* ---- all pages of all spans ---- */

typedef struct hash_spans {
    device_hash_span span[DEVICE_SPANS];
} hash_spans;

typedef struct hash_shared {
    uint64_t lanes[HASH_GROUPS][HASH_LANES], secret[HASH_SECRET];
} hash_shared;

typedef struct hash_own {
    const uint8_t *page;
    uint64_t number;
    uint32_t bytes; /* 0: no such page */
} hash_own;

DEVICE_FN void hash_pages(const place *at, const hash_spans *all, hash_shared *shared, hash_own *own,
                          int phase) {
    const device_hash_span *s = &all->span[at->span];
    const uint32_t group = at->thread / HASH_LANES, lane = at->thread % HASH_LANES;
    if (phase == 0) {
        if (at->thread < HASH_SECRET) {
            shared->secret[at->thread] = hash_secret[at->thread];
        }
        return;
    }
    if (phase == 1) {
        own->number = (uint64_t)at->block * HASH_GROUPS + group;
        uint64_t first = own->number * DEVICE_HASH_PAGE;
        uint64_t left = first < s->bytes ? s->bytes - first : 0;
        own->bytes = (uint32_t)(left < DEVICE_HASH_PAGE ? left : DEVICE_HASH_PAGE);
        own->page = (const uint8_t *)s->values + first;
        if (own->bytes > HASH_SHORT) {
            shared->lanes[group][lane] = hash_lane(own->page, own->bytes, lane, shared->secret);
        }
        return;
    }
    if (lane || own->bytes == 0) {
        return;
    }
    s->to[own->number] = own->bytes > HASH_SHORT ? hash_merge(shared->lanes[group], own->bytes)
                         : own->bytes > 16       ? hash_to_240(own->page, own->bytes)
                                                 : hash_to_16(own->page, own->bytes);
}
KERNEL_IN_PHASES(hash_pages, hash_spans, hash_shared, hash_own, 3)

static device_result run_hash(const device_queue *queue, const device_hash_span *spans, uint32_t count,
                              device_failure *why) {
    hash_spans all;
    uint64_t max = 0;
    for (uint32_t i = 0; i < count && i < DEVICE_SPANS; i++) {
        all.span[i] = spans[i];
        max = spans[i].bytes > max ? spans[i].bytes : max;
    }
    uint64_t pages = (max + DEVICE_HASH_PAGE - 1) / DEVICE_HASH_PAGE;
    return pages ? hash_pages_launch(queue, launch_blocks(pages * HASH_LANES), count, &all, why)
                 : DEVICE_DONE;
}

#endif
