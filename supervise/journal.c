/*
 * The journal: STORE/attempts.jsonl. Each attempt has two lines, one for its start and one for its end. Each line is
 * synced before anything else happens. Lines are only appended. A line that a crash has torn is left alone and ignored.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "supervise/internal.h"

#define JOURNAL        "attempts.jsonl"
#define LINE_MAX_BYTES ((size_t)1 << 20)
#define OPEN_MAX       1024             /* attempts without an end that are kept, to be passed on with it */
#define FIRST_LOCK     ((off_t)1 << 40) /* far past the end: a lock may cover bytes that do not exist */

/* ------------------------------------------------------------------------------------------------------ locking */

/* Each run locks one byte. If the hashes of two runs collide, they cannot be supervised at the same time. */
static struct flock lock_of(const char *run) {
    uint64_t hash = UINT64_C(14695981039346656037);
    for (const char *c = run; *c; c++) {
        hash = (hash ^ (unsigned char)*c) * UINT64_C(1099511628211);
    }
    return (struct flock){.l_type = F_WRLCK,
                          .l_whence = SEEK_SET,
                          .l_start = FIRST_LOCK + (off_t)(hash & UINT64_C(0xffffffff)),
                          .l_len = 1};
}

/* The process that supervises the run on this machine, according to the journal; 0: none. */
static pid_t living_supervisor(const supervise_options *options) {
    char host[SUPERVISE_HOST_MAX] = "";
    attempt_list list;
    ckd_error err;
    pid_t pid = 0;
    gethostname(host, sizeof(host) - 1);
    if (supervise_attempts(&list, options->store, options->run, &err) == CKD_OK && list.count > 0) {
        const attempt *last = &list.items[list.count - 1];
        bool here = strcmp(last->host, host) == 0 && last->supervisor > 0;
        pid = here && process_lives((pid_t)last->supervisor) ? (pid_t)last->supervisor : 0;
    }
    supervise_attempts_free(&list);
    return pid;
}

static ckd_status take_lock(journal *j, const supervise_options *options, ckd_error *err) {
    uint64_t until = supervise_monotonic() + (options->grace_s + 10) * SECOND;
    for (bool reported = false;; reported = true) {
        struct flock lock = lock_of(options->run);
        if (fcntl(j->fd, F_OFD_SETLK, &lock) == 0) {
            return CKD_OK;
        }
        if (errno != EAGAIN && errno != EACCES) {
            return supervise_error_sys(err, errno, "cannot lock %s", j->path);
        }
        pid_t pid = living_supervisor(options);
        if (pid) {
            return supervise_error(err, CKD_E_BUSY, "%s is already supervised, by process %d", options->run,
                                   (int)pid);
        }
        if (supervise_monotonic() > until) {
            return supervise_error(err, CKD_E_BUSY, "%s is already supervised, from another machine",
                                   options->run);
        }
        if (!reported && options->on_message) {
            options->on_message(options->message_context,
                                "waiting for the previous supervisor's command to end");
        }
        nanosleep(&(struct timespec){.tv_nsec = (long)(SECOND / 10)}, NULL);
    }
}

ckd_status journal_open(journal *j, const supervise_options *options, ckd_error *err) {
    snprintf(j->path, sizeof(j->path), "%s/" JOURNAL, options->store);
    j->fd = open(j->path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (j->fd < 0) {
        return supervise_error_sys(err, errno, "cannot open %s", j->path);
    }
    int folder = open(options->store, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) {
        fsync(folder);
        close(folder);
    }
    ckd_status status = take_lock(j, options, err);
    if (status != CKD_OK) {
        journal_close(j);
    }
    return status;
}

void journal_close(journal *j) {
    if (j->fd >= 0) {
        close(j->fd);
    }
    j->fd = -1;
}

/* ------------------------------------------------------------------------------------------------------ writing */

static bool ends_in_line(int fd) {
    char last;
    off_t size = lseek(fd, 0, SEEK_END);
    return size <= 0 || pread(fd, &last, 1, size - 1) != 1 || last == '\n';
}

static ckd_status write_all(const journal *j, const char *data, size_t size, ckd_error *err) {
    while (size > 0) {
        ssize_t n = write(j->fd, data, size);
        if (n < 0 && errno != EINTR) {
            return supervise_error_sys(err, errno, "cannot write %s", j->path);
        }
        data += n > 0 ? n : 0;
        size -= n > 0 ? (size_t)n : 0;
    }
    return CKD_OK;
}

static ckd_status append(journal *j, json_t *line, ckd_error *err) {
    char *text = line ? json_dumps(line, JSON_COMPACT) : NULL;
    size_t size = text ? strlen(text) : 0;
    char *whole = text ? malloc(size + 3) : NULL;
    ckd_status status = whole ? CKD_OK : supervise_error(err, CKD_E_NOMEM, "out of memory");
    if (whole) {
        int torn = !ends_in_line(j->fd);
        int length = snprintf(whole, size + 3, "%s%s\n", torn ? "\n" : "", text);
        status = write_all(j, whole, (size_t)length, err);
    }
    if (status == CKD_OK && fsync(j->fd) != 0) {
        status = supervise_error_sys(err, errno, "cannot sync %s", j->path);
    }
    free(whole);
    free(text);
    json_decref(line);
    return status;
}

static json_t *text_or_null(const char *text) {
    json_t *value = *text ? json_string(text) : json_null();
    return value ? value : json_string("?");
}

static json_t *step_or_null(uint64_t step) {
    return step == SUPERVISE_NO_STEP ? json_null() : json_integer((json_int_t)step);
}

static json_t *seconds_or_null(uint64_t ns) {
    return ns ? json_real((double)ns / (double)SECOND) : json_null();
}

static json_t *time_of(uint64_t ns) {
    char text[48];
    time_t seconds = (time_t)(ns / SECOND);
    struct tm t;
    gmtime_r(&seconds, &t);
    size_t length = strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &t);
    snprintf(text + length, sizeof(text) - length, ".%03uZ", (unsigned)(ns % SECOND / 1000000));
    return json_string(text);
}

/* The words as a list. */
static json_t *list_or_null(const char *words) {
    json_t *list = words ? json_array() : json_null();
    char *copy = words ? strdup(words) : NULL, *rest = copy;
    for (char *word; copy && (word = strsep(&rest, " "));) {
        json_array_append_new(list, text_or_null(word));
    }
    free(copy);
    return list;
}

ckd_status journal_start(journal *j, const attempt *a, char *const *command, ckd_error *err) {
    json_t *words = json_array();
    for (size_t i = 0; words && command[i]; i++) {
        json_array_append_new(words, text_or_null(command[i]));
    }
    return append(
        j,
        json_pack("{s:s, s:s, s:I, s:o, s:s, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "event",
                  "start", "run", a->run, "attempt", (json_int_t)a->number, "time", time_of(a->start_ns),
                  "host", a->host, "supervisor", (json_int_t)a->supervisor, "pid", (json_int_t)a->pid,
                  "checkpoint", text_or_null(a->from), "from_step", step_or_null(a->from_step), "first_step",
                  step_or_null(a->first_step), "reached", step_or_null(a->reached), "suspect",
                  text_or_null(a->suspect), "hosts", list_or_null(a->hosts), "bad_hosts",
                  list_or_null(a->bad_hosts), "excluded", list_or_null(a->excluded), "command", words),
        err);
}

ckd_status journal_end(journal *j, const attempt *a, ckd_error *err) {
    json_t *code = json_integer(a->code);
    json_t *line = json_pack(
        "{s:s, s:s, s:I, s:o, s:i, s:O?, s:O?, s:O?, s:b, s:o, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:o, s:o, s:b, s:s, s:s}",
        "event", "end", "run", a->run, "attempt", (json_int_t)a->number, "time", time_of(a->end_ns), "end",
        (int)a->end, "exit", a->end == ATTEMPT_EXITED ? code : NULL, "signal",
        a->end == ATTEMPT_KILLED ? code : NULL, "errno", a->end == ATTEMPT_REFUSED ? code : NULL, "hung",
        a->hung, "anomaly", text_or_null(a->anomaly), "unhealthy", a->unhealthy, "stopped_by",
        a->stopped_by ? json_integer(a->stopped_by) : json_null(), "last_step", step_or_null(a->last_step),
        "first_trained", step_or_null(a->first_trained), "last_trained", step_or_null(a->last_trained),
        "resume_s", seconds_or_null(a->resume_ns), "trained_s", seconds_or_null(a->trained_ns), "hang",
        text_or_null(a->hang), "first_save_s", seconds_or_null(a->first_save_ns), "status",
        a->status < 0 ? json_null() : json_integer(a->status), "bad_hosts", list_or_null(a->bad_hosts),
        "excluded", list_or_null(a->excluded), "alarms", (json_int_t)a->alarms, "alarm",
        text_or_null(a->alarm), "alarm_step", step_or_null(a->alarms ? a->alarm_step : SUPERVISE_NO_STEP),
        "alarm_acts", a->alarm_acts, "reason", a->reason, "verdict", a->verdict);
    json_decref(code);
    return append(j, line, err);
}

/* ------------------------------------------------------------------------------------------------------ reading */

static uint64_t read_time(const json_t *object) {
    const char *text = json_string_value(json_object_get(object, "time"));
    struct tm t = {0};
    const char *rest = text ? strptime(text, "%Y-%m-%dT%H:%M:%S", &t) : NULL;
    time_t seconds = rest ? timegm(&t) : -1;
    if (seconds < 0) {
        return 0;
    }
    double fraction = *rest == '.' ? strtod(rest, NULL) : 0;
    return (uint64_t)seconds * SECOND + (uint64_t)(fraction * (double)SECOND);
}

static uint64_t read_step(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    return json_is_integer(value) && json_integer_value(value) >= 0 ? (uint64_t)json_integer_value(value)
                                                                    : SUPERVISE_NO_STEP;
}

static uint64_t read_seconds(const json_t *object, const char *key) {
    double seconds = json_number_value(json_object_get(object, key));
    return seconds > 0 && seconds < 1e9 ? (uint64_t)(seconds * (double)SECOND) : 0;
}

static void read_text(char *to, size_t size, const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    snprintf(to, size, "%s", text ? text : "");
}

/* A list of words, which have no spaces. Replaces *to. */
static void read_words(char **to, const json_t *object, const char *key) {
    const json_t *list = json_object_get(object, key), *item;
    host_list words = {0};
    size_t i;
    ckd_error why;
    json_array_foreach(list, i, item) {
        if (json_is_string(item)) {
            hosts_append(&words, json_string_value(item), &why);
        }
    }
    free(*to);
    *to = words.count > 0 ? hosts_joined(&words, ' ') : NULL;
    hosts_free(&words);
}

static int64_t read_integer(const json_t *object, const char *key, int64_t otherwise) {
    const json_t *value = json_object_get(object, key);
    return json_is_integer(value) ? json_integer_value(value) : otherwise;
}

static void read_start(attempt *a, const json_t *line) {
    a->start_ns = read_time(line);
    a->pid = read_integer(line, "pid", 0);
    a->supervisor = read_integer(line, "supervisor", 0);
    a->from_step = read_step(line, "from_step");
    a->first_step = read_step(line, "first_step");
    a->reached = read_step(line, "reached");
    a->last_step = a->first_trained = a->last_trained = a->alarm_step = SUPERVISE_NO_STEP;
    a->status = -1;
    read_text(a->host, sizeof(a->host), line, "host");
    read_text(a->from, sizeof(a->from), line, "checkpoint");
    read_text(a->suspect, sizeof(a->suspect), line, "suspect");
    read_words(&a->hosts, line, "hosts");
    read_words(&a->bad_hosts, line, "bad_hosts");
    read_words(&a->excluded, line, "excluded");
}

static void read_end(attempt *a, const json_t *line) {
    int64_t end = read_integer(line, "end", ATTEMPT_LOST);
    static const char *const codes[] = {
        [ATTEMPT_EXITED] = "exit", [ATTEMPT_KILLED] = "signal", [ATTEMPT_REFUSED] = "errno"};
    a->end = end >= ATTEMPT_EXITED && end <= ATTEMPT_LOST ? (attempt_end)end : ATTEMPT_LOST;
    a->code = a->end == ATTEMPT_LOST ? 0 : (int)read_integer(line, codes[a->end], 0);
    a->end_ns = read_time(line);
    a->hung = json_is_true(json_object_get(line, "hung"));
    a->unhealthy = json_is_true(json_object_get(line, "unhealthy"));
    read_text(a->anomaly, sizeof(a->anomaly), line, "anomaly");
    a->alarms = (uint64_t)read_integer(line, "alarms", 0);
    read_text(a->alarm, sizeof(a->alarm), line, "alarm");
    a->alarm_step = read_step(line, "alarm_step");
    const json_t *acts = json_object_get(line, "alarm_acts"); /* older journals do not say it */
    a->alarm_acts = acts ? json_is_true(acts) : a->unhealthy && !a->anomaly[0];
    a->stopped_by = (int)read_integer(line, "stopped_by", 0);
    a->last_step = read_step(line, "last_step");
    a->first_trained = read_step(line, "first_trained");
    a->last_trained = read_step(line, "last_trained");
    a->resume_ns = read_seconds(line, "resume_s");
    a->trained_ns = read_seconds(line, "trained_s");
    a->first_save_ns = read_seconds(line, "first_save_s");
    read_text(a->hang, sizeof(a->hang), line, "hang");
    a->status = (int)read_integer(line, "status", -1);
    read_text(a->reason, sizeof(a->reason), line, "reason");
    read_text(a->verdict, sizeof(a->verdict), line, "verdict");
    read_words(&a->bad_hosts, line, "bad_hosts");
    read_words(&a->excluded, line, "excluded");
}

static void free_words(attempt *a) {
    free(a->hosts);
    free(a->bad_hosts);
    free(a->excluded);
}

static attempt *find(attempt_list *list, const char *run, uint64_t number) {
    for (size_t i = list->count; i-- > 0;) {
        if (list->items[i].number == number && strcmp(list->items[i].run, run) == 0) {
            return &list->items[i];
        }
    }
    return NULL;
}

static ckd_status add(attempt_list *list, const json_t *line, const char *run, uint64_t number,
                      ckd_error *err) {
    if ((list->count & (list->count - 1)) == 0) {
        size_t room = list->count ? 2 * list->count : 1;
        attempt *grown = realloc(list->items, room * sizeof(*grown));
        if (!grown) {
            return supervise_error(err, CKD_E_NOMEM, "out of memory");
        }
        list->items = grown;
    }
    attempt *a = &list->items[list->count++];
    *a = (attempt){.number = number};
    snprintf(a->run, sizeof(a->run), "%s", run);
    read_start(a, line);
    return CKD_OK;
}

/* Adds a line to the list. `only`: the run; NULL: all. A line of an unknown kind is ignored. */
static ckd_status take_line(attempt_list *list, const char *text, size_t size, const char *only,
                            ckd_error *err) {
    json_t *line = json_loadb(text, size, JSON_REJECT_DUPLICATES, NULL);
    const char *event = json_string_value(json_object_get(line, "event"));
    const char *run = json_string_value(json_object_get(line, "run"));
    int64_t number = read_integer(line, "attempt", 0);
    ckd_status status = CKD_OK;
    if (!event || !run || number <= 0 || strlen(run) > CKD_RUN_MAX) {
        list->damaged++;
    } else if (!only || strcmp(run, only) == 0) {
        attempt *known = find(list, run, (uint64_t)number);
        if (strcmp(event, "start") == 0 && !known) {
            status = add(list, line, run, (uint64_t)number, err);
        } else if (strcmp(event, "end") == 0 && known) {
            read_end(known, line);
        }
    }
    json_decref(line);
    return status;
}

/* ---- one after the other ---- */

/* The attempts whose end was not read yet. */
typedef struct passing {
    attempt_list open;
    supervise_visit visit;
    void *context;
} passing;

static ckd_status pass_on(passing *p, size_t at, ckd_error *err) {
    attempt a = p->open.items[at];
    p->open.count--;
    memmove(&p->open.items[at], &p->open.items[at + 1], (p->open.count - at) * sizeof(a));
    ckd_status status = p->visit(p->context, &a, err);
    free_words(&a);
    return status;
}

/* A run has one attempt at a time: the next one means that the end of the last one was never recorded. */
static ckd_status pass_complete(passing *p, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = p->open.count; i-- > 0 && status == CKD_OK;) {
        const attempt *a = &p->open.items[i], *newest = &p->open.items[p->open.count - 1];
        bool followed = a != newest && strcmp(a->run, newest->run) == 0;
        if (a->end != ATTEMPT_RUNNING || followed || (i == 0 && p->open.count > OPEN_MAX)) {
            status = pass_on(p, i, err);
        }
    }
    return status;
}

/* A line longer than LINE_MAX_BYTES is cut off. It then counts as damaged, like any line that is not a JSON object. */
static ckd_status read_lines(attempt_list *out, FILE *from, const char *run, passing *p, ckd_error *err) {
    char *text = malloc(LINE_MAX_BYTES);
    ckd_status status = text ? CKD_OK : supervise_error(err, CKD_E_NOMEM, "out of memory");
    while (status == CKD_OK && fgets(text, (int)LINE_MAX_BYTES, from)) {
        size_t size = strlen(text), damaged = out->damaged;
        status = size > 1 ? take_line(out, text, size, run, err) : CKD_OK;
        if (size > 0 && text[size - 1] != '\n' && feof(from)) {
            out->damaged = damaged; /* torn, or being written */
        }
        THEN(status, p ? pass_complete(p, err) : CKD_OK);
    }
    free(text);
    return status;
}

static ckd_status read_journal(attempt_list *out, const char *store, const char *run, passing *p,
                               ckd_error *err) {
    char path[4200];
    snprintf(path, sizeof(path), "%s/" JOURNAL, store);
    FILE *from = fopen(path, "re");
    if (!from) {
        return errno == ENOENT ? CKD_OK : supervise_error_sys(err, errno, "cannot open %s", path);
    }
    ckd_status status = read_lines(out, from, run, p, err);
    if (status == CKD_OK && ferror(from)) {
        status = supervise_error_sys(err, errno, "cannot read %s", path);
    }
    fclose(from);
    return status;
}

ckd_status supervise_attempts(attempt_list *out, const char *store, const char *run, ckd_error *err) {
    *out = (attempt_list){0};
    ckd_status status = read_journal(out, store, run, NULL, err);
    if (status != CKD_OK) {
        supervise_attempts_free(out);
    }
    return status;
}

ckd_status supervise_attempts_each(size_t *damaged, const char *store, supervise_visit visit, void *context,
                                   ckd_error *err) {
    passing p = {.visit = visit, .context = context};
    ckd_status status = read_journal(&p.open, store, NULL, &p, err);
    while (status == CKD_OK && p.open.count > 0) {
        status = pass_on(&p, 0, err);
    }
    *damaged = p.open.damaged;
    supervise_attempts_free(&p.open);
    return status;
}

void supervise_attempts_free(attempt_list *list) {
    for (size_t i = 0; i < list->count; i++) {
        free_words(&list->items[i]);
    }
    free(list->items);
    *list = (attempt_list){0};
}
