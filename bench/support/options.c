#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bench/support/support.h"

static void usage(const bench_option *options, size_t count) {
    fprintf(stderr, "usage: %s", program_invocation_short_name);
    for (size_t i = 0; i < count; i++) {
        const bench_option *o = &options[i];
        fprintf(stderr, " [%s", o->name);
        if (o->number || o->count) {
            fprintf(stderr, " %llu..%llu", (unsigned long long)o->least, (unsigned long long)o->most);
        } else if (!o->flag) {
            fputs(o->text ? " TEXT" : o->real ? " X" : " exact|near|coarse", stderr);
        }
        fputs("]", stderr);
    }
    fputs("\n", stderr);
    exit(2);
}

int bench_fidelity(ckd_fidelity *out, const char *name) {
    for (*out = CKD_EXACT; *out <= CKD_COARSE; ++*out) {
        if (strcmp(ckd_fidelity_name(*out), name) == 0) {
            return 1;
        }
    }
    return 0;
}

static int set_value(const bench_option *o, const char *value) {
    char *end;
    if (o->text) {
        *o->text = value;
        return 1;
    }
    if (o->fidelity) {
        return bench_fidelity(o->fidelity, value);
    }
    if (o->real) {
        *o->real = strtod(value, &end);
        return *value && !*end;
    }
    uint64_t number = strtoull(value, &end, 10);
    if (!*value || *end || *value == '-' || number < o->least || number > o->most) {
        return 0;
    }
    if (o->count) {
        *o->count = number;
    } else {
        *o->number = (int)number;
    }
    return 1;
}

void bench_parse(const bench_option *options, size_t count, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        size_t k = 0;
        while (k < count && strcmp(argv[i], options[k].name) != 0) {
            k++;
        }
        if (k < count && options[k].flag) {
            *options[k].flag = 1;
        } else if (k == count || ++i == argc || !set_value(&options[k], argv[i])) {
            usage(options, count);
        }
    }
}
