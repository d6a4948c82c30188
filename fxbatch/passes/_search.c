/* The search for a schedule of one component: search_steps.py has the twin in Python, and says what it does.

   In: the columns of a Component. Out: the step of each of its calls. */

#include "_search.h"

typedef struct {
    int64_t lb, value; /* steps that must follow at least; weight of the calls that have not run */
    uint64_t hash;
    int32_t ready;     /* calls in `list` */
    char *memory;      /* one block: what follows */
    int64_t *weight;   /* [signatures] of ready calls, together */
    uint64_t *mark;    /* [signatures] */
    int32_t *top;      /* [signatures]: above the longest chain that remains */
    int32_t *remaining, *waiting; /* [places]: calls that have not run; of those, ready ones */
    int32_t *list;     /* [calls] ready calls */
    uint16_t *before;  /* [calls]: inputs that have not been made */
} State;

typedef struct {
    int64_t lb, value;
    uint64_t hash;
    int32_t parent, action;
} Choice;

static int by_choice(const void *x, const void *y)
{
    const Choice *a = x, *b = y;
    if (a->lb != b->lb)
        return a->lb < b->lb ? -1 : 1;
    if (a->value != b->value)
        return a->value < b->value ? -1 : 1;
    if (a->parent != b->parent)
        return a->parent < b->parent ? -1 : 1;
    return a->action < b->action ? -1 : a->action > b->action;
}

static int make_state(const Search *p, State *s)
{
    if (!(s->memory = PyMem_Calloc(1, p->size)))
        return -1;
    s->weight = (int64_t *)s->memory;
    s->mark = (uint64_t *)(s->weight + p->signatures);
    s->top = (int32_t *)(s->mark + p->signatures);
    s->remaining = s->top + p->signatures;
    s->waiting = s->remaining + p->places;
    s->before = (uint16_t *)(s->waiting + p->places);
    s->list = (int32_t *)(s->memory + p->head);
    return 0;
}

static void copy_state(const Search *p, State *to, const State *from)
{
    memcpy(to->memory, from->memory, p->head);
    memcpy(to->list, from->list, from->ready * sizeof(int32_t));
    to->lb = from->lb, to->value = from->value, to->hash = from->hash, to->ready = from->ready;
}

static void make_ready(const Search *p, State *s, int32_t c)
{
    s->list[s->ready++] = c;
    s->waiting[p->place[c]]++;
    s->weight[p->sig[c]] += p->weight[c];
    s->mark[p->sig[c]] ^= (uint64_t)p->mark[c];
}

/* Run all ready calls of a signature; `base` is the place of its shortest chain. */
static void run_action(const Search *p, State *s, int32_t action, int64_t base, int64_t *step, int64_t now)
{
    int32_t kept = 0, ready = s->ready;
    s->value -= s->weight[action];
    s->hash ^= s->mark[action];
    s->weight[action] = 0;
    s->mark[action] = 0;
    int32_t *run = s->list + p->calls; /* the second half of the list is scratch */
    int32_t running = 0;
    for (int32_t i = 0; i < ready; i++) {
        int32_t c = s->list[i];
        if (p->sig[c] == action)
            run[running++] = c;
        else
            s->list[kept++] = c;
    }
    s->ready = kept;
    for (int32_t i = 0; i < running; i++) {
        int32_t c = run[i];
        s->remaining[p->place[c]]--;
        s->waiting[p->place[c]]--;
        if (step)
            step[c] = now;
        for (int64_t e = p->offsets[c]; e < p->offsets[c + 1]; e++)
            if (--s->before[p->readers[e]] == 0)
                make_ready(p, s, (int32_t)p->readers[e]);
    }
    while (s->top[action] > base && !s->remaining[s->top[action] - 1])
        s->top[action]--, s->lb--;
}

static void start(const Search *p, State *s, const int64_t *base, const uint16_t *indegree)
{
    memset(s->memory, 0, p->head);
    s->lb = p->places, s->value = 0, s->hash = 0, s->ready = 0;
    memcpy(s->before, indegree, p->calls * sizeof(uint16_t));
    for (int64_t k = 0; k < p->signatures; k++)
        s->top[k] = (int32_t)base[k + 1];
    for (int64_t c = 0; c < p->calls; c++) {
        s->remaining[p->place[c]]++;
        s->value += p->weight[c];
        if (!indegree[c])
            make_ready(p, s, (int32_t)c);
    }
}

/* The choices of all states, best first; returns how many. */
static int64_t choose(const Search *p, State *const *states, int64_t n, const int64_t *base, Choice *choices)
{
    int64_t found = 0;
    for (int64_t k = 0; k < n; k++) {
        const State *s = states[k];
        for (int32_t g = 0; g < p->signatures; g++) {
            int64_t top = s->top[g];
            if (!s->weight[g])
                continue;
            while (top > base[g] && s->remaining[top - 1] == s->waiting[top - 1])
                top--;
            Choice *x = &choices[found++];
            x->lb = s->lb - (s->top[g] - top);
            x->value = s->value - s->weight[g];
            x->hash = s->hash ^ s->mark[g];
            x->parent = (int32_t)k, x->action = g;
        }
    }
    qsort(choices, found, sizeof(Choice), by_choice);
    return found;
}

/* The first `width` choices whose states differ, in place; returns how many. */
static int64_t distinct(Choice *choices, int64_t found, int64_t width)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < found && kept < width; i++) {
        int64_t j = 0;
        while (j < kept && choices[j].hash != choices[i].hash)
            j++;
        if (j == kept)
            choices[kept++] = choices[i];
    }
    return kept;
}

/* From level to level; `trail` gets (parent, action) a kept state and level. -> levels, -1 without memory */
static int64_t descend(const Search *p, State *pool, int64_t width, const int64_t *base, const uint16_t *indegree,
                       Choice *choices, State **now, State **next, int32_t *children, int32_t **trail)
{
    int64_t states = 1, level = 0, room = 0, spare = 2 * width;
    State **free_ones = next + width; /* [2 * width] */
    for (int64_t i = 0; i < spare; i++)
        free_ones[i] = &pool[i];
    now[0] = free_ones[--spare];
    start(p, now[0], base, indegree);
    while (now[0]->lb > 0) {
        int64_t kept = distinct(choices, choose(p, now, states, base, choices), width);
        if (level == room) {
            room = 2 * room + 256;
            int32_t *grown = PyMem_Realloc(*trail, room * width * 2 * sizeof(int32_t));
            if (!grown)
                return -1;
            *trail = grown;
        }
        memset(children, 0, states * sizeof(int32_t));
        for (int64_t k = 0; k < kept; k++)
            children[choices[k].parent]++;
        for (int64_t k = 0; k < states; k++)
            if (!children[k])
                free_ones[spare++] = now[k];
        for (int64_t k = 0; k < kept; k++) {
            int32_t parent = choices[k].parent, action = choices[k].action;
            next[k] = now[parent];
            if (--children[parent]) {
                next[k] = free_ones[--spare];
                copy_state(p, next[k], now[parent]);
            }
            run_action(p, next[k], action, base[action], NULL, 0);
            (*trail)[(level * width + k) * 2] = parent;
            (*trail)[(level * width + k) * 2 + 1] = action;
        }
        memcpy(now, next, kept * sizeof(State *));
        states = kept;
        level++;
    }
    return level;
}

int64_t search_all(const Search *p, int64_t width, const int64_t *base, const uint16_t *indegree,
                          int64_t *step)
{
    int64_t level = -1, made = 0;
    State *pool = PyMem_Calloc(2 * width, sizeof(State)), **pointers = PyMem_Calloc(4 * width, sizeof(State *));
    Choice *choices = PyMem_Malloc((width * p->signatures + 1) * sizeof(Choice));
    int32_t *children = PyMem_Malloc(width * sizeof(int32_t)), *trail = NULL, *actions = NULL;
    if (pool && pointers && choices && children) {
        while (made < 2 * width && make_state(p, &pool[made]) == 0)
            made++;
        if (made == 2 * width)
            level = descend(p, pool, width, base, indegree, choices, pointers, pointers + width, children, &trail);
    }
    if (level > 0 && (actions = PyMem_Malloc(level * sizeof(int32_t)))) {
        for (int64_t l = level - 1, k = 0; l >= 0; l--) {
            actions[l] = trail[(l * width + k) * 2 + 1];
            k = trail[(l * width + k) * 2];
        }
        start(p, &pool[0], base, indegree);
        for (int64_t l = 0; l < level; l++)
            run_action(p, &pool[0], actions[l], base[actions[l]], step, l);
    } else if (level > 0)
        level = -1;
    for (int64_t i = 0; i < made; i++)
        PyMem_Free(pool[i].memory);
    PyMem_Free(pool);
    PyMem_Free(pointers);
    PyMem_Free(choices);
    PyMem_Free(children);
    PyMem_Free(trail);
    PyMem_Free(actions);
    return level;
}

/* search(sig i32, place i32, offsets, readers, weight, mark, base, STEP, width) -> steps */
PyObject *search(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Py_ssize_t width = 1;
    if (take(&a, args, n, "iiqqqqqQ") < 0 || number(&a, args, n, 8, &width) < 0)
        return NULL;
    Search p = {.calls = LENGTH(0), .signatures = LENGTH(6) - 1, .sig = I32(0), .place = I32(1),
                .offsets = I64(2), .readers = I64(3), .weight = I64(4), .mark = I64(5)};
    const int64_t *base = I64(6);
    p.places = p.signatures >= 0 ? base[p.signatures] : 0;
    int good = width > 0 && p.signatures > 0 && p.calls > 0 && p.calls < INT32_MAX && LENGTH(1) == p.calls &&
               LENGTH(2) == p.calls + 1 && LENGTH(4) == p.calls && LENGTH(5) == p.calls && LENGTH(7) == p.calls;
    uint16_t *indegree = PyMem_Calloc(p.calls + 1, sizeof(uint16_t));
    if (!indegree) {
        release(&a);
        return PyErr_NoMemory();
    }
    for (int64_t s = 0; good && s < p.signatures; s++)
        good = base[s] >= 0 && base[s] <= base[s + 1];
    for (int64_t c = 0; good && c < p.calls; c++) {
        good = p.sig[c] >= 0 && p.sig[c] < p.signatures && p.weight[c] > 0 && p.place[c] >= base[p.sig[c]] &&
               p.place[c] < base[p.sig[c] + 1] && p.offsets[c] >= 0 && p.offsets[c] <= p.offsets[c + 1] &&
               p.offsets[c + 1] <= LENGTH(3);
        for (int64_t e = good ? p.offsets[c] : 0; good && e < p.offsets[c + 1]; e++) {
            good = p.readers[e] > c && p.readers[e] < p.calls && indegree[p.readers[e]] < UINT16_MAX;
            if (good)
                indegree[p.readers[e]]++;
        }
    }
    p.head = p.signatures * 20 + p.places * 8 + p.calls * 2;
    p.head = (p.head + 7) / 8 * 8;
    p.size = p.head + p.calls * 8;
    int64_t steps = good ? search_all(&p, width, base, indegree, I64(7)) : 0;
    PyMem_Free(indegree);
    PyObject *none = finish(&a, good);
    Py_XDECREF(none);
    if (none && steps < 0)
        return PyErr_NoMemory();
    return none ? PyLong_FromLongLong(steps) : NULL;
}

