/*
 * Random numbers and text. Without a text file, the trainer reads what Unix machines have anyway: licences,
 * documentation, Perl's manual, Python's and C's sources. The set of files depends on the machine. On one machine the
 * search always gives the same bytes, until a package is installed or removed: it uses fixed places, sorted names and
 * fixed limits.
 */
#include <errno.h>
#include <fnmatch.h>
#include <fts.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "examples/gpt.h"

#define TEXT_MIN ((size_t)200 * 1000)
#define TEXT_MAX ((size_t)8 * 1000 * 1000)
enum { PAGE = 4096 }; /* bytes that go to training or to validation as a whole */

/* -------------------------------------------------------------------------------------------------------- RNG */

static uint64_t splitmix(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void gpt_rng_seed(gpt_rng *rng, uint64_t seed, uint64_t stream) {
    uint64_t state = seed;
    state = splitmix(&state) ^ stream;
    for (int i = 0; i < 4; i++)
        rng->s[i] = splitmix(&state);
}

static uint64_t rotate(uint64_t x, int k) {
    return (x << k) | (x >> (64 - k));
}

uint64_t gpt_rng_next(gpt_rng *rng) {
    uint64_t *s = rng->s, result = rotate(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate(s[3], 45);
    return result;
}

float gpt_rng_normal(gpt_rng *rng) {
    uint64_t sum = 0; /* sum of twelve integers below 2^21 */
    for (int i = 0; i < 4; i++) {
        uint64_t bits = gpt_rng_next(rng);
        sum += (bits & 0x1fffff) + ((bits >> 21) & 0x1fffff) + ((bits >> 42) & 0x1fffff);
    }
    return (float)((double)sum / 2097152.0 - 6.0);
}

/* ------------------------------------------------------------------------------------------------------- text */

/* Places in order. Each gives at most `limit` bytes, so that no kind of text dominates. */
static const struct place {
    const char *where; /* glob for directories */
    const char *names; /* patterns for file names, separated by spaces */
    size_t limit;
} places[] = {
    {"/usr/share/common-licenses", "*", 300 * 1000},
    {"/usr/share/doc", "*.txt *.md *.rst README NEWS FAQ", 2000 * 1000},
    {"/usr/share/perl*", "*.pod", 2000 * 1000},
    {"/usr/lib/python3*", "*.py", 4000 * 1000},
    {"/usr/include", "*.h", 2000 * 1000},
    {"/usr/share/doc", "copyright", 1000 * 1000},
};

static int name_matches(const char *name, const char *patterns) {
    char copy[128], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", patterns);
    for (char *p = strtok_r(copy, " ", &rest); p; p = strtok_r(NULL, " ", &rest))
        if (fnmatch(p, name, 0) == 0)
            return 1;
    return 0;
}

/* Appends at most `limit` bytes of a file. A file with a zero byte is not text and adds nothing. */
static size_t append_file(gpt_text *text, const char *path, size_t limit) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return 0;
    size_t got = fread(text->bytes + text->size, 1, limit, file);
    fclose(file);
    if (memchr(text->bytes + text->size, 0, got))
        return 0;
    text->size += got;
    return got;
}

static int by_name(const FTSENT **a, const FTSENT **b) {
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

static void append_place(gpt_text *text, const struct place *place) {
    glob_t found;
    if (glob(place->where, 0, NULL, &found) != 0)
        return;
    FTS *tree = fts_open(found.gl_pathv, FTS_PHYSICAL | FTS_NOCHDIR, by_name);
    size_t left = place->limit;
    for (FTSENT *entry; tree && left > 0 && (entry = fts_read(tree)) != NULL;) {
        if (entry->fts_info != FTS_F || !name_matches(entry->fts_name, place->names))
            continue;
        size_t room = TEXT_MAX - text->size < left ? TEXT_MAX - text->size : left;
        left -= append_file(text, entry->fts_path, room);
        if (text->size == TEXT_MAX)
            break;
    }
    if (tree)
        fts_close(tree);
    globfree(&found);
}

static int read_named(gpt_text *text, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "train_gpt: cannot read the text %s: %s\n", path, strerror(errno));
        return -1;
    }
    text->size = fread(text->bytes, 1, TEXT_MAX, file);
    fclose(file);
    snprintf(text->source, sizeof text->source, "%s", path);
    return 0;
}

/*
 * Moves every tenth page behind all others, in order. The last tenth, kept for validation, then has text from all
 * places. A remainder of fewer than ten pages stays before the validation pages.
 */
static int split_pages(gpt_text *text) {
    size_t groups = text->size / (10 * (size_t)PAGE), train = text->size - groups * PAGE;
    uint8_t *held = malloc(groups * PAGE);
    if (!held)
        return -1;
    for (size_t i = 0; i < groups; i++) {
        memcpy(held + i * PAGE, text->bytes + (10 * i + 9) * PAGE, PAGE);
        memmove(text->bytes + 9 * i * PAGE, text->bytes + 10 * i * PAGE, 9 * (size_t)PAGE);
    }
    memmove(text->bytes + 9 * groups * PAGE, text->bytes + 10 * groups * PAGE,
            text->size - 10 * groups * PAGE);
    memcpy(text->bytes + train, held, groups * PAGE);
    free(held);
    text->train = train;
    return 0;
}

static uint64_t fnv1a(const uint8_t *bytes, size_t size) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static int find_text(gpt_text *out, const char *path) {
    *out = (gpt_text){0};
    out->bytes = malloc(TEXT_MAX);
    if (!out->bytes) {
        fprintf(stderr, "train_gpt: out of memory for the text\n");
        return -1;
    }
    if (path && read_named(out, path)) {
        gpt_text_free(out);
        return -1;
    }
    if (!path) {
        for (size_t i = 0; i < sizeof places / sizeof *places; i++)
            append_place(out, &places[i]);
        snprintf(out->source, sizeof out->source, "licences, documentation and sources found in /usr");
    }
    return 0;
}

/* Writes under a temporary name, so that an interruption leaves no partial file. */
int gpt_text_keep(const char *path) {
    char other[4096];
    gpt_text text;
    if (access(path, F_OK) == 0)
        return 0;
    if (find_text(&text, NULL))
        return -1;
    int length = snprintf(other, sizeof other, "%s.%ld", path, (long)getpid());
    FILE *file = length < (int)sizeof other ? fopen(other, "wb") : NULL;
    int good = file && fwrite(text.bytes, 1, text.size, file) == text.size;
    good = file && fclose(file) == 0 && good && rename(other, path) == 0;
    if (!good)
        fprintf(stderr, "train_gpt: cannot write the text %s: %s\n", path, strerror(errno));
    if (file && !good)
        remove(other);
    gpt_text_free(&text);
    return good ? 0 : -1;
}

int gpt_text_load(gpt_text *out, const char *path) {
    if (find_text(out, path))
        return -1;
    if (out->size < TEXT_MIN) {
        fprintf(
            stderr,
            "train_gpt: only %zu bytes of text in %s, at least %zu are needed; name a file with --text FILE\n",
            out->size, out->source, TEXT_MIN);
        gpt_text_free(out);
        return -1;
    }
    out->hash = fnv1a(out->bytes, out->size);
    if (split_pages(out)) {
        fprintf(stderr, "train_gpt: out of memory for the text\n");
        gpt_text_free(out);
        return -1;
    }
    return 0;
}

void gpt_text_free(gpt_text *text) {
    free(text->bytes);
    *text = (gpt_text){0};
}

/* ----------------------------------------------------------------------------------------------------- batches */

static void copy_window(const gpt_text *text, size_t at, size_t length, size_t row, uint8_t *tokens,
                        uint8_t *targets) {
    memcpy(tokens + row * length, text->bytes + at, length);
    memcpy(targets + row * length, text->bytes + at + 1, length);
}

void gpt_text_batch(const gpt_text *text, const gpt_config *config, uint64_t seed, uint64_t step,
                    uint8_t *tokens, uint8_t *targets, gpt_rng *rng) {
    size_t length = (size_t)config->context;
    gpt_rng stream;
    gpt_rng_seed(&stream, seed, step);
    if (rng)
        *rng = stream;
    if (!tokens)
        return;
    for (size_t row = 0; row < (size_t)config->batch; row++)
        copy_window(text, (size_t)(gpt_rng_next(&stream) % (text->train - length)), length, row, tokens,
                    targets);
}

void gpt_text_validation(const gpt_text *text, const gpt_config *config, size_t index, size_t count,
                         uint8_t *tokens, uint8_t *targets) {
    size_t length = (size_t)config->context, rows = (size_t)config->batch;
    size_t span = text->size - text->train - length - 1, windows = count * rows;
    for (size_t row = 0; row < rows; row++) {
        size_t at = text->train + (index * rows + row) * (span / windows);
        copy_window(text, at, length, row, tokens, targets);
    }
}
