/* ckptdelta follow: a folder that always has the newest weights of a run. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

enum {
    OPT_MEMBER = 0x200,
    OPT_TENSOR,
    OPT_EXCLUDE,
    OPT_SHARD_SIZE,
    OPT_ONCE,
    OPT_EXEC,
    OPT_EXEC_FAILS,
    OPT_MAX_LAG,
    OPT_INTERVAL,
    OPT_OVERWRITE
};

static const struct argp_option options_table[] = {
    {"into", 'i', "DIR", 0,
     "The folder (required); it is created. Files that are not weights stay as they are", 1},
    {"run", 'r', "RUN", 0, "The run to follow [default: the only one]", 1},
    {"tag", 't', "TAG", 0, "Follow the checkpoint with this tag, wherever it is moved", 1},
    {"once", OPT_ONCE, 0, 0, "Bring DIR to the newest checkpoint, and end", 2},
    {"exec", OPT_EXEC, "COMMAND", 0,
     "Run this in a shell after each version, with CKPTDELTA_STEP, CKPTDELTA_ID and CKPTDELTA_INTO; what it prints goes to standard error",
     2},
    {"exec-fails", OPT_EXEC_FAILS, "stop|go-on", 0, "What to do when COMMAND fails [default: go-on]", 2},
    {"max-lag", OPT_MAX_LAG, "TIME|N", 0,
     "Warn while DIR is behind for longer than this (30s, 10m), or by more than N checkpoints; with --once, the exit status is then 1",
     2},
    {"interval", OPT_INTERVAL, "TIME", 0, "Look at the store at least this often [default: 2s]", 2},
    {"member", OPT_MEMBER, "NAME", 0,
     "Only the tensors of this part of the state, such as model: those whose names begin with NAME and a dot, which DIR has without that beginning",
     3},
    {"tensor", OPT_TENSOR, "GLOB", 0,
     "Only tensors whose names in the store match, whatever their role; may be given several times [default: all with the role weight, or all of the member]",
     3},
    {"exclude", OPT_EXCLUDE, "GLOB", 0, "No tensors whose names match; may be given several times", 3},
    {"shard-size", OPT_SHARD_SIZE, "SIZE", 0,
     "Largest size of a file, such as 500M; a larger tensor gets a file of its own [default: 5 GB]", 3},
    {"overwrite", OPT_OVERWRITE, 0, 0, "Replace model files in DIR that follow did not write", 3},
    {0},
};

static const char doc[] =
    "Keep the weights in DIR at the newest checkpoint of a run, for programs that serve the model while it is trained. "
    "DIR has model.safetensors, or model-00001-of-0000N.safetensors and so on with model.safetensors.index.json."
    "\vNew files are made beside the old ones, verified, and renamed together; a program that has an old one mapped keeps it. "
    "Only blocks that changed are read. After a crash the next start finishes or undoes what was begun. "
    "Checkpoints that are suspect or damaged are passed over. A store or run that does not exist yet is waited for, except with --once.\n"
    "\n"
    "Examples:\n"
    "  ckptdelta follow ckpts --run rl --into model\n"
    "  ckptdelta follow ckpts --run rl --into model --member model    # saved by Python as {\"model\": model}\n"
    "  ckptdelta follow ckpts --run rl --into model --exec 'curl -s -X POST localhost:8000/reload'\n"
    "  ckptdelta follow ckpts --tag prod --into model --once\n";

typedef struct arguments {
    cli_options common;
    const char *run, *exec;
    ckd_follow_options follow;
    uint64_t interval_s, lag_s, lag_count;
    bool once, exec_stops, lag_given, lag_by_time;
    cli_progress progress;
    bool lag_reported;
} arguments;

/* ---- arguments ---- */

static void add_glob(const char *const **list, size_t *count, const char *glob) {
    const char **grown = realloc((void *)*list, (*count + 1) * sizeof(*grown));
    if (!grown) {
        exit(CLI_FAILED);
    }
    grown[(*count)++] = glob;
    *list = grown;
}

static void take_lag(arguments *a, const char *text, struct argp_state *state) {
    a->lag_given = true;
    a->lag_by_time = !cli_parse_u64(&a->lag_count, text);
    if (a->lag_by_time) {
        a->lag_s = cli_seconds(state, "--max-lag", text);
    }
}

static void take_exec_fails(arguments *a, const char *text, struct argp_state *state) {
    a->exec_stops = strcmp(text, "stop") == 0;
    if (!a->exec_stops && strcmp(text, "go-on") != 0) {
        argp_error(state, "--exec-fails is stop or go-on, not '%s'", text);
    }
}

static error_t parse_choice(int key, char *arg, struct argp_state *state, arguments *a) {
    switch (key) {
    case OPT_MEMBER:
        if (!arg[0]) {
            argp_error(state, "--member is the name of a part of the state, such as model");
        }
        a->follow.member = arg;
        return 0;
    case OPT_TENSOR:
        add_glob(&a->follow.only, &a->follow.only_count, arg);
        return 0;
    case OPT_EXCLUDE:
        add_glob(&a->follow.exclude, &a->follow.exclude_count, arg);
        return 0;
    case OPT_SHARD_SIZE:
        if (!cli_parse_size(&a->follow.shard_bytes, arg) || a->follow.shard_bytes == 0) {
            argp_error(state, "--shard-size is a size such as 500M or 5G, not '%s'", arg);
        }
        return 0;
    case OPT_OVERWRITE:
        a->follow.overwrite = 1;
        return 0;
    case ARGP_KEY_END:
        if (!a->follow.into) {
            argp_error(state, "--into names the DIR that follows");
        }
        if (a->run && a->follow.tag) {
            argp_error(state, "follow either --run or --tag, not both");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = state->child_inputs[1] = &a->common;
        return 0;
    case ARGP_KEY_ARG:
        return cli_take_run(&a->common, &a->run, arg, state);
    case 'i':
        a->follow.into = arg;
        return 0;
    case 'r':
        a->run = arg;
        return 0;
    case 't':
        a->follow.tag = arg;
        return 0;
    case OPT_ONCE:
        a->once = true;
        return 0;
    case OPT_EXEC:
        a->exec = arg;
        return 0;
    case OPT_EXEC_FAILS:
        take_exec_fails(a, arg, state);
        return 0;
    case OPT_MAX_LAG:
        take_lag(a, arg, state);
        return 0;
    case OPT_INTERVAL:
        a->interval_s = cli_seconds(state, "--interval", arg);
        if (a->interval_s < 1 || a->interval_s > 365 * 24 * 3600) {
            argp_error(state, "--interval is from 1s to 365d, not '%s'", arg);
        }
        return 0;
    default:
        return parse_choice(key, arg, state, a);
    }
}

/* ---- reports ---- */

static double lag_of(const ckd_checkpoint *c) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    double seconds = (double)now.tv_sec + (double)now.tv_nsec / 1e9 - (double)c->created_ns / 1e9;
    return seconds > 0 ? seconds : 0;
}

static ckd_status print_json(const arguments *a, const ckd_follow_result *r, ckd_error *err) {
    char id[CKD_ID_TEXT];
    const ckd_checkpoint *c = &r->checkpoint;
    ckd_id_text(id, &c->id);
    return cli_json_print_line(
        json_pack("{s:i, s:o, s:s, s:o, s:b, s:I, s:I, s:I, s:I, s:I, s:o, s:f}", "schema", 1, "checkpoint",
                  cli_json_text(cli_ref_text_of(c).text), "id", id, "into", cli_json_text(a->follow.into),
                  "applied", r->applied, "files", (json_int_t)r->files, "bytes", (json_int_t)r->bytes,
                  "written_bytes", (json_int_t)r->written_bytes, "read_bytes", (json_int_t)r->read_bytes,
                  "passed_over", (json_int_t)r->passed_over, "created",
                  cli_json_text(cli_text_time(c->created_ns).text), "age_s", lag_of(c)),
        err);
}

static ckd_status print_result(const arguments *a, const ckd_follow_result *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    if (a->common.json) {
        status = print_json(a, r, err);
    } else if (cli_prints_text(&a->common)) {
        cli_print_clean(stdout, a->follow.into);
        printf(" has %s%s: %s", cli_ref_text_of(&r->checkpoint).text, r->applied ? "" : " already",
               cli_text_size(r->bytes).text);
        printf(r->applied ? ", %s of it written, %s read; saved %s ago\n" : "\n",
               cli_text_size(r->written_bytes).text, cli_text_size(r->read_bytes).text,
               cli_text_duration(lag_of(&r->checkpoint)).text);
    }
    /* With --once this is reported at the end, after --exec has run. */
    if (fflush(stdout) != 0 && status == CKD_OK && !a->once) {
        status = cli_error_sys(err, errno, "", "cannot write to standard output");
    }
    return status;
}

/* Whether the folder is behind the newest checkpoint of its run by more than is allowed. */
static bool is_behind(const arguments *a, ckd_store *store, const ckd_checkpoint *here) {
    ckd_checkpoint_list *all = NULL;
    uint64_t newer = 0;
    double longest = 0;
    if (!a->lag_given || a->follow.tag || cli_id_is_none(&here->id) ||
        ckd_store_list(&all, store, here->run, NULL) != CKD_OK) {
        return false;
    }
    for (size_t i = 0; i < all->count; i++) {
        const ckd_checkpoint *c = &all->items[i];
        if (c->step > here->step) {
            newer++;
            longest = lag_of(c) > longest ? lag_of(c) : longest;
        }
    }
    ckd_checkpoint_list_free(all);
    return a->lag_by_time ? longest > (double)a->lag_s : newer > a->lag_count;
}

/* Warns when the folder falls behind, once until it has caught up. */
static bool report_lag(arguments *a, ckd_store *store, const ckd_checkpoint *here) {
    bool behind = is_behind(a, store, here);
    if (behind && !a->lag_reported) {
        cli_note("%s is behind: %s is not the newest checkpoint, for longer than --max-lag allows",
                 a->follow.into, cli_ref_text_of(here).text);
    }
    a->lag_reported = behind;
    return behind;
}

/* ---- the user's command ---- */

static void set_environment(const arguments *a, const ckd_checkpoint *c) {
    char id[CKD_ID_TEXT], step[24];
    ckd_id_text(id, &c->id);
    snprintf(step, sizeof(step), "%" PRIu64, c->step);
    setenv("CKPTDELTA_ID", id, 1);
    setenv("CKPTDELTA_STEP", step, 1);
    setenv("CKPTDELTA_INTO", a->follow.into, 1);
}

/* Passes a request to stop on to the command, once. Signals do not interrupt waitpid, because it is restarted. */
static int wait_for(pid_t child) {
    int how = 0;
    bool passed_on = false;
    while (waitpid(child, &how, WNOHANG) == 0) {
        if (cli_interrupted() && !passed_on) {
            kill(child, SIGTERM);
            passed_on = true;
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return how;
}

/* Runs --exec. Returns false if it failed and the command must therefore end. */
static bool run_exec(const arguments *a, const ckd_checkpoint *c) {
    extern char **environ;
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t defaults;
    char *argv[] = {(char *)"sh", (char *)"-c", (char *)a->exec, NULL};
    pid_t child;
    if (!a->exec) {
        return true;
    }
    set_environment(a, c);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    posix_spawnattr_init(&attributes);
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    int errnum = posix_spawn(&child, "/bin/sh", &actions, &attributes, argv, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    int how = errnum ? 0 : wait_for(child);
    if (errnum) {
        cli_note("--exec cannot be run: %s", strerror(errnum));
    } else if (WIFSIGNALED(how)) {
        cli_note("--exec was killed by signal %d at step %" PRIu64, WTERMSIG(how), c->step);
    } else if (WEXITSTATUS(how)) {
        cli_note("--exec failed with exit status %d at step %" PRIu64, WEXITSTATUS(how), c->step);
    } else {
        return true;
    }
    return !a->exec_stops;
}

/* ---- following ---- */

static int on_progress(void *context, uint64_t done, uint64_t total) {
    return total ? cli_progress_update(context, done, total) : cli_interrupted();
}

static ckd_status apply(arguments *a, ckd_follow *f, ckd_follow_result *r, ckd_error *err) {
    cli_progress_begin(&a->progress, "writing", a->common.quiet);
    ckd_status status = ckd_follow_apply(r, f, err);
    cli_progress_end(&a->progress);
    return status;
}

/* Prints the content of DIR, and runs --exec, which depends on DIR alone. */
static ckd_status announce(const arguments *a, const ckd_follow_result *r, ckd_error *err) {
    ckd_status status = r->applied || a->once ? print_result(a, r, err) : CKD_OK;
    return r->applied && !run_exec(a, &r->checkpoint)
               ? cli_error(err, CKD_E_STATE, "stopped, as --exec failed")
               : status;
}

static int follow_once(arguments *a, ckd_store *store, ckd_follow *f) {
    ckd_error err;
    ckd_follow_result r;
    if (apply(a, f, &r, &err) != CKD_OK) {
        return cli_fail_with_hint(&err, &a->common);
    }
    cli_committed("%s has %s", a->follow.into, cli_ref_text_of(&r.checkpoint).text);
    ckd_status status = announce(a, &r, &err);
    if (status == CKD_E_STATE) {
        return cli_fail_as(&err, CLI_FAILED);
    }
    if (status != CKD_OK) {
        (void)cli_fail(&err); /* DIR is up to date anyway */
    }
    bool behind = report_lag(a, store, &r.checkpoint);
    return r.passed_over ? CLI_CORRUPT : behind ? CLI_FAILED : CLI_DONE;
}

/* Whether a failure may pass: no checkpoint yet, all of them damaged, a lock that is held. */
static bool may_pass(const ckd_error *err) {
    return err->status == CKD_E_NOT_FOUND || err->status == CKD_E_CORRUPT ||
           err->status == CKD_E_UNSUPPORTED || err->status == CKD_E_BUSY;
}

#define OPEN_AGAIN (-1)

static int follow_on(arguments *a, ckd_store *store, ckd_follow *f) {
    ckd_error err;
    for (;;) {
        ckd_follow_result r;
        int newer;
        ckd_status status = ckd_follow_wait(&newer, f, a->lag_given ? 1000 : CKD_FOLLOW_FOREVER, &err);
        if (status == CKD_E_STATE) {
            cli_note("%s, and is opened again", err.message);
            return OPEN_AGAIN;
        }
        if (status != CKD_OK) {
            return cli_fail(&err);
        }
        ckd_follow_applied(&r, f);
        if (newer) {
            status = apply(a, f, &r, &err);
        }
        if (status != CKD_OK && !may_pass(&err)) {
            return cli_fail_with_hint(&err, &a->common);
        }
        if (status == CKD_OK && newer && announce(a, &r, &err) != CKD_OK) {
            return cli_fail(&err);
        }
        if (status != CKD_OK) {
            nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        }
        report_lag(a, store, &r.checkpoint);
    }
}

/* Waits for a store that does not exist yet. */
static ckd_status open_store(ckd_store **out, const arguments *a, ckd_error *err) {
    bool reported = false;
    for (;;) {
        ckd_status status = cli_open_store(out, &a->common, CKD_OPEN_READ, err);
        if (status != CKD_E_NOT_FOUND || a->once) {
            return status;
        }
        if (cli_interrupted()) {
            return cli_error(err, CKD_E_CANCELLED, "waiting was cancelled");
        }
        if (!reported) {
            cli_note("%s is not a store yet; waiting for it", a->common.store);
            reported = true;
        }
        nanosleep(&(struct timespec){.tv_sec = (time_t)(a->interval_s ? a->interval_s : 2)}, NULL);
    }
}

static int follow_store(arguments *a) {
    ckd_error err;
    ckd_store *store = NULL;
    ckd_follow *f = NULL;
    ckd_status status = open_store(&store, a, &err);
    THEN(status, ckd_follow_open(&f, store, &a->follow, &err));
    int code = status != CKD_OK ? cli_fail_with_hint(&err, &a->common)
               : a->once        ? follow_once(a, store, f)
                                : follow_on(a, store, f);
    ckd_follow_close(f);
    ckd_store_close(store);
    return code;
}

static int run(arguments *a) {
    int code;
    a->follow.run = a->run;
    a->follow.poll_ms = a->interval_s * 1000;
    a->follow.on_progress = on_progress;
    a->follow.progress_context = &a->progress;
    cli_interrupt_catch();
    (void)signal(SIGPIPE, SIG_IGN); /* --exec runs even if nobody reads the output */
    do {
        code = follow_store(a);
    } while (code == OPEN_AGAIN);
    return code;
}

int cmd_follow(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_threads_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE] [RUN]", doc, children, 0, 0};
    arguments a = {.common.command = "follow", .follow = CKD_FOLLOW_OPTIONS_INIT};
    cli_parse_arguments(&argp, argc, argv, &a);
    int code = run(&a);
    free((void *)a.follow.only);
    free((void *)a.follow.exclude);
    return code;
}
