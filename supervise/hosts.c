/*
 * Finds the hosts of a job: from Slurm's list of nodes, from a file as mpirun and torchrun's launchers read it, or this
 * host.
 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "supervise/internal.h"

#define LINE_BYTES 4096

/* ------------------------------------------------------------------------------------------------------- lists */

/* Names are passed to shells and schedulers, so they must be plain, and must not look like an option. */
static bool is_name(const char *name, size_t length) {
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-:@";
    return length > 0 && length < SUPERVISE_NAME_MAX && name[0] != '-' && strspn(name, allowed) >= length;
}

bool hosts_have(const host_list *list, const char *name) {
    for (size_t i = 0; i < list->count; i++) {
        if (strcmp(list->names[i], name) == 0) {
            return true;
        }
    }
    return false;
}

static ckd_status append(host_list *list, const char *name, size_t length, ckd_error *err) {
    if (!is_name(name, length)) {
        return supervise_error(err, CKD_E_INVALID, "'%.*s' is not a valid host name",
                               (int)(length < 80 ? length : 80), name);
    }
    if (list->count == HOSTS_MAX) {
        return supervise_error(err, CKD_E_INVALID, "more than %d hosts", HOSTS_MAX);
    }
    char *copy = strndup(name, length);
    char **grown = copy ? realloc(list->names, (list->count + 1) * sizeof(*grown)) : NULL;
    if (!grown) {
        free(copy);
        return supervise_error(err, CKD_E_NOMEM, "out of memory");
    }
    list->names = grown;
    list->names[list->count++] = copy;
    return CKD_OK;
}

ckd_status hosts_append(host_list *list, const char *name, ckd_error *err) {
    return append(list, name, strlen(name), err);
}

static ckd_status add(host_list *list, const char *name, size_t length, ckd_error *err) {
    for (size_t i = 0; i < list->count; i++) {
        if (strncmp(list->names[i], name, length) == 0 && !list->names[i][length]) {
            return CKD_OK;
        }
    }
    return append(list, name, length, err);
}

ckd_status hosts_add(host_list *list, const char *name, ckd_error *err) {
    return add(list, name, strlen(name), err);
}

void hosts_free(host_list *list) {
    for (size_t i = 0; i < list->count; i++) {
        free(list->names[i]);
    }
    free(list->names);
    *list = (host_list){0};
}

char *hosts_joined(const host_list *list, char between) {
    size_t size = 1;
    for (size_t i = 0; i < list->count; i++) {
        size += strlen(list->names[i]) + 1;
    }
    char *text = calloc(size, 1), *end = text;
    for (size_t i = 0; text && i < list->count; i++) {
        end = stpcpy(end, list->names[i]);
        *end++ = between;
    }
    if (text && list->count > 0) {
        end[-1] = '\0';
    }
    return text;
}

/* Are these names of one host? One of them may lack the domain. */
static bool is_same(const char *a, const char *b) {
    size_t length = strcspn(a, ".");
    bool whole = !a[length] || !b[strcspn(b, ".")];
    return strcasecmp(a, b) == 0 || (whole && strcspn(b, ".") == length && strncasecmp(a, b, length) == 0);
}

bool host_is_own(const char *name) {
    char own[SUPERVISE_NAME_MAX] = "";
    gethostname(own, sizeof(own) - 1);
    return is_same(name, own) || strcmp(name, "localhost") == 0;
}

/* -------------------------------------------------------------------------------------- the list of nodes of Slurm */

/* The end of one entry of the list: a comma outside brackets, or the end of the text. NULL: a bracket is not closed. */
static const char *end_of_entry(const char *text) {
    bool inside = false;
    for (; *text && (inside || *text != ','); text++) {
        if (*text == '[' || *text == ']') {
            if (inside == (*text == '[')) {
                return NULL;
            }
            inside = !inside;
        }
    }
    return inside ? NULL : text;
}

static ckd_status not_understood(const char *entry, ckd_error *err) {
    return supervise_error(err, CKD_E_INVALID, "cannot parse the list of nodes: '%.80s'", entry);
}

static ckd_status expand(host_list *out, const char *entry, ckd_error *err);

/* Makes a name for each number of "01-12" or "7", with the text before and after the bracket. */
static ckd_status expand_range(host_list *out, const char *entry, const char *range, const char *after,
                               ckd_error *err) {
    char name[SUPERVISE_NAME_MAX];
    unsigned long long first, last;
    char *end;
    int before = (int)strcspn(entry, "["), digits = (int)strspn(range, "0123456789");
    if (digits == 0 || digits > 12) {
        return not_understood(entry, err);
    }
    first = last = strtoull(range, &end, 10);
    if (*end == '-' && isdigit((unsigned char)end[1])) {
        last = strtoull(end + 1, &end, 10);
    }
    if ((*end != ',' && *end != ']') || last < first || last - first >= HOSTS_MAX) {
        return not_understood(entry, err);
    }
    ckd_status status = CKD_OK;
    for (; first <= last && status == CKD_OK; first++) {
        int length = snprintf(name, sizeof(name), "%.*s%0*llu%s", before, entry, digits, first, after);
        status = length < (int)sizeof(name) ? expand(out, name, err) : not_understood(entry, err);
    }
    return status;
}

/* Expands the first bracket, and then each result again. */
static ckd_status expand(host_list *out, const char *entry, ckd_error *err) {
    const char *at = strchr(entry, '[');
    if (!at) {
        return hosts_add(out, entry, err);
    }
    const char *close = strchr(at, ']');
    ckd_status status = CKD_OK;
    for (const char *range = at + 1; range <= close && status == CKD_OK; range += strcspn(range, ",]") + 1) {
        status = expand_range(out, entry, range, close + 1, err);
    }
    return status;
}

ckd_status hosts_expand(host_list *out, const char *text, ckd_error *err) {
    ckd_status status = CKD_OK;
    *out = (host_list){0};
    for (const char *end; status == CKD_OK && *text; text = *end ? end + 1 : end) {
        end = end_of_entry(text);
        char *entry = end ? strndup(text, (size_t)(end - text)) : NULL;
        if (!entry) {
            status = not_understood(text, err);
            break;
        }
        status = expand(out, entry, err);
        free(entry);
    }
    if (status != CKD_OK) {
        hosts_free(out);
    }
    return status;
}

/* ------------------------------------------------------------------------------------------------------- files */

/* The name that a line begins with: "host", "host:slots", "host slots=N". Length 0: none, as in a comment. */
static const char *name_of(size_t *length, const char *line) {
    line += strspn(line, " \t");
    *length = *line == '#' ? 0 : strcspn(line, " \t\r\n#");
    const char *colon = memchr(line, ':', *length);
    if (colon && colon[1 + strspn(colon + 1, "0123456789")] == line[*length]) { /* not an address of IPv6 */
        *length = (size_t)(colon - line);
    }
    return line;
}

ckd_status hosts_read(host_list *out, const char *path, ckd_error *err) {
    char line[LINE_BYTES];
    size_t length;
    *out = (host_list){0};
    FILE *from = fopen(path, "re");
    if (!from) {
        return supervise_error_sys(err, errno, "cannot open %.200s", path);
    }
    ckd_status status = CKD_OK;
    while (status == CKD_OK && fgets(line, sizeof(line), from)) {
        const char *name = name_of(&length, line);
        status = length ? add(out, name, length, err) : CKD_OK;
    }
    if (status == CKD_OK && ferror(from)) {
        status = supervise_error_sys(err, errno, "cannot read %.200s", path);
    }
    fclose(from);
    if (status != CKD_OK) {
        hosts_free(out);
    }
    return status;
}

/* Copies the lines, with another name or without the host. */
static bool copy_lines(FILE *to, FILE *from, const char *host, const char *by) {
    char line[LINE_BYTES];
    while (fgets(line, sizeof(line), from)) {
        size_t length;
        const char *name = name_of(&length, line);
        bool is_it = length == strlen(host) && strncmp(name, host, length) == 0;
        if (is_it && by) {
            fprintf(to, "%s%s", by, name + length);
        } else if (!is_it) {
            fputs(line, to);
        }
    }
    return !ferror(from) && !ferror(to);
}

ckd_status hosts_replace(const char *path, const char *host, const char *by, ckd_error *err) {
    char *target = realpath(path, NULL); /* a link stays a link */
    char fresh[LINE_BYTES];
    struct stat old;
    FILE *from = target ? fopen(target, "re") : NULL;
    if (!from) {
        free(target);
        return supervise_error_sys(err, errno, "cannot open %.200s", path);
    }
    snprintf(fresh, sizeof(fresh), "%s.XXXXXX", target);
    int fd = mkostemp(fresh, O_CLOEXEC);
    FILE *to = fd < 0 ? NULL : fdopen(fd, "w");
    bool done = to && fstat(fileno(from), &old) == 0 && fchmod(fd, old.st_mode & 0777) == 0 &&
                copy_lines(to, from, host, by) && fflush(to) == 0 && fsync(fd) == 0 &&
                rename(fresh, target) == 0;
    ckd_status status = done ? CKD_OK : supervise_error_sys(err, errno, "cannot write %.200s", path);
    if (!done && fd >= 0) {
        unlink(fresh);
    }
    if (to) {
        fclose(to);
    }
    fclose(from);
    free(target);
    return status;
}

/* ------------------------------------------------------------------------------------------------ those of a job */

ckd_status hosts_of_job(host_list *out, const supervise_options *o, ckd_error *err) {
    const char *slurm = getenv("SLURM_JOB_NODELIST"), *pbs = getenv("PBS_NODEFILE");
    char own[SUPERVISE_NAME_MAX] = "localhost";
    if (o->hosts_file) {
        return hosts_read(out, o->hosts_file, err);
    }
    if (slurm && *slurm) {
        return hosts_expand(out, slurm, err);
    }
    if (pbs && *pbs) {
        return hosts_read(out, pbs, err);
    }
    *out = (host_list){0};
    gethostname(own, sizeof(own) - 1);
    return hosts_add(out, own, err);
}
