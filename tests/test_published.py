"Published layouts, on tiny trees: every image where it belongs, no copy on both sides, and one sentence for whatever is missing"
import gzip, json, os, pickle
import numpy as np, pytest
from PIL import Image
from fedbook.errors import Refused
from fedbook.published import *

def draw(path, colour, mode='RGB', size=(5,5)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)

def refuses(said, f, *args, **kw):
    with pytest.raises(Refused) as e: f(*args, **kw)
    assert all(str(s) in str(e.value) for s in said.split('|')) and '\n' not in str(e.value) and str(e.value)[-1] in '.?', e.value

def pixels(d, split): return [tuple(p) for p in getattr(d, f'{split}_x')[:,0,0].tolist()]

# PACS and DomainNet

DOMAINS,KINDS = ('art_painting','sketch'),('dog','elephant','giraffe')

def pacs(root, below='kfold', lists=''):
    for d,domain in enumerate(DOMAINS):
        for c,kind in enumerate(KINDS):
            for i in range(4): draw(root/below/domain/kind/f'pic_{i}.png', (100*d, 50*c, i))
        rows = {'train': (0,1), 'crossval': (2,), 'test': (0,1,2)}
        (root/lists).mkdir(exist_ok=True)
        for end,which in rows.items():
            (root/lists/f'{domain}_{end}_kfold.txt').write_text(''.join(f'{domain}/{k}/pic_{i}.png {c+1}\n' for c,k in enumerate(KINDS) for i in which) + 'sketch/dog/n02103406_4068-1.png 1\n'*(domain=='sketch'))
    return root

@pytest.mark.parametrize('below,lists', [('kfold',''), ('images','splits'), ('','')])
def test_pacs(tmp_path, below, lists):
    d = from_lists(pacs(tmp_path/'pacs', below, lists), size=5)
    assert d.classes == list(KINDS) and d.group_names == dict(domain=list(DOMAINS)) and d.train_x.shape == (12,5,5,3) and d.test_x.shape == (6,5,5,3)
    assert pixels(d, 'train') == [(100*g, 50*c, i%2) for i,(g,c) in enumerate(zip(d.group('domain')[0], d.train_y))]
    assert {p[2] for p in pixels(d, 'test')} == {2} and (np.bincount(d.test_y) == 2).all()     # the crossval list, not the test list
    d = from_lists(tmp_path/'pacs', size=3, classes=['giraffe','dog'], name='two')
    assert d.classes == ['giraffe','dog'] and d.name == 'two' and {(y,p[1]) for y,p in zip(d.train_y.tolist(), pixels(d, 'train'))} == {(0,100),(1,0)}

def test_domainnet(tmp_path):
    for domain in ('clipart','real'):
        for c,k in enumerate(('bird','feather')):
            for i in range(3): draw(tmp_path/domain/k/f'{i}.jpg', (200,0,0))
        for end,which in (('train',(0,1)),('test',(2,))):
            (tmp_path/f'{domain}_{end}.txt').write_text('\n'.join(f'{domain}/{k}/{i}.jpg {c}' for c,k in enumerate(('bird','feather')) for i in which))
    d = from_lists(tmp_path, 'domainnet', 4)
    assert d.name == 'domainnet' and d.classes == ['bird','feather'] and len(d.train_y) == 8 and d.group('domain')[1].tolist() == [0,0,1,1]

def test_bad_lists(tmp_path):
    root = pacs(tmp_path/'pacs')
    refuses("'giraffe'", from_lists, root, classes=['girafe'])
    refuses("'pacs'", from_lists, root, 'pac')
    refuses('is not domainnet|clipart_train.txt|clipart_test.txt|clipart/CLASS/PICTURE|splits', from_lists, root, 'domainnet')
    one = root/'sketch_train_kfold.txt'
    good = one.read_text()
    for line,said in (('sketch/dog/pic_9.png 1','pic_9.png'), ('sketch/dog/pic_0.png 0','from 1'), ('../../x.png 1','style/class/picture'), ('sketch/../../x.png 1','style/class/picture'), ('sketch/dog/pic_0.png','class number'), ('sketch/cow/pic_0.png 1','two folders')):
        one.write_text(good + line)
        refuses(said, from_lists, root)
    one.write_text(good)
    (root/'kfold/sketch/dog/pic_0.png').write_bytes(b'no picture')
    refuses('pic_0.png|damaged', from_lists, root)

# LEAF

def page(rng, n): return (rng.integers(0, 256, (n,784))/255).tolist()

def leaf(folder, name, of):
    folder.mkdir(parents=True, exist_ok=True)
    (folder/name).write_text(json.dumps(dict(users=list(of), num_samples=[len(u['y']) for u in of.values()], user_data=of)))

def test_leaf_keeps_one_of_equal_images(tmp_path):
    rng = np.random.default_rng(0)
    a,b = dict(x=page(rng, 10), y=list(range(10))),dict(x=page(rng, 5), y=[61]*5)
    twice = dict(x=b['x'][:1]+b['x'], y=[61]*6)
    leaf(tmp_path, 'all_data_0.json', dict(w2=a)), leaf(tmp_path, 'all_data_1.json', dict(w1=twice))
    d = from_leaf(tmp_path)
    every = np.concatenate([d.train_x, d.test_x])
    assert len(every) == len({x.tobytes() for x in every}) == 15 and d.group_names == dict(writer=['w1','w2'])
    assert [np.bincount(g).tolist() for g in d.groups['writer']] == [[4,8],[1,2]] and d.n_classes == 62 and d.classes[10] == 'A' and d.classes[61] == 'z'
    first = every[np.concatenate(d.groups['writer'])==1]
    assert {x.tobytes() for x in first} == {np.round(np.array(r)*255).astype(np.uint8).tobytes() for r in a['x']}
    assert from_leaf(tmp_path).fingerprint == d.fingerprint != from_leaf(tmp_path, seed=1).fingerprint

def test_leaf_split_has_no_copy_on_both_sides(tmp_path):
    rng = np.random.default_rng(0)
    x = page(rng, 4)
    leaf(tmp_path/'train', 'all_data_0_niid_0_keep_0_train_9.json', dict(w=dict(x=x[:3], y=[1,2,3])))
    leaf(tmp_path/'test', 'all_data_0_niid_0_keep_0_test_9.json', dict(w=dict(x=[x[0],x[3]], y=[1,4]), v=dict(x=[x[0]], y=[1])))
    d = from_leaf(tmp_path)
    assert d.train_y.tolist() == [1,2,3] and d.test_y.tolist() == [4,1] and d.group('writer')[1].tolist() == [1,0]   # another writer's equal image stays

@pytest.mark.parametrize('bad', [[], dict(users=['w']), dict(users=['w'], user_data={}), dict(users=['w'], user_data=dict(w=[])), dict(users=['w'], user_data=dict(w=dict(x=[[0]*783], y=[1]))),
    dict(users=['w'], user_data=dict(w=dict(x=[[0]*784,[0]], y=[1,1]))), dict(users=['w'], user_data=dict(w=dict(x=[[2]*784], y=[1]))), dict(users=['w'], user_data=dict(w=dict(x=[[0]*784], y=[62]))),
    dict(users=['w'], user_data=dict(w=dict(x=[[0]*784], y=['a']))), dict(users=['w'], user_data=dict(w=dict(x=[[0]*784], y=[1,2])))])
def test_bad_leaf(tmp_path, bad):
    (tmp_path/'a.json').write_text(json.dumps(bad))
    refuses('a.json', from_leaf, tmp_path)

def test_damaged_or_no_leaf(tmp_path):
    refuses('no JSON files', from_leaf, tmp_path)
    (tmp_path/'a.json').write_text('{"users": [')
    refuses('a.json|damaged', from_leaf, tmp_path)

# CINIC-10

def test_cinic10(tmp_path):
    for p,part in enumerate(('train','valid','test')):
        for c,k in enumerate(CINIC):
            for i,name in enumerate(('cifar10-train-7.png','cifar-10-test-8.png','n02_3.png')): draw(tmp_path/part/k/name, (c,p,i), size=(32,32))
    d = from_cinic10(tmp_path)
    assert d.classes == CINIC == sorted(CINIC) and d.train_x.shape == (60,32,32,3) and len(d.test_y) == 30
    assert [p[0] for p in pixels(d, 'train')] == d.train_y.tolist() and {p[1] for p in pixels(d, 'train')} == {0,1} and {p[1] for p in pixels(d, 'test')} == {2}
    assert [int(p[2]==2) for p in pixels(d, 'train')] == d.group('origin')[0].tolist() and d.group_names['origin'][1] == 'ImageNet'
    assert len(from_cinic10(tmp_path, parts=('train',)).train_y) == 30
    os.rename(tmp_path/'test'/'ship', tmp_path/'test'/'boat')
    refuses('ship', from_cinic10, tmp_path)
    refuses('valid', from_cinic10, tmp_path/'train')

# Digit5

def digit5(root, n_train=12, n_test=11, size=5):
    "Made-up digits: a picture's brightness is its number, at its style's own place in 0 … 255; the corner at the upper right is white"
    from scipy.io import savemat
    def grey(n, base):
        x = np.tile((base+np.arange(n, dtype=np.uint8))[:,None,None,None], (1,size,size,1))
        x[:,0,-1] = 255
        return x
    def colour(n, base): return np.repeat(grey(n, base), 3, 3)
    def one_hot(n): return np.eye(10)[np.arange(n)%10]
    def numbers(n): return np.where(np.arange(n)%10==0, 10, np.arange(n)%10)[:,None]
    root.mkdir(exist_ok=True)
    sizes = dict(train=n_train, test=n_test)
    savemat(root/'mnist_data.mat', {k: v for s,n in sizes.items() for k,v in ((f'{s}_32', grey(n, 0)), (f'label_{s}', one_hot(n)))})
    savemat(root/'mnistm_with_label.mat', {k: v for s,n in sizes.items() for k,v in ((s, colour(n, 50)), (f'label_{s}', one_hot(n)))})
    for style,base in (('svhn',100), ('synth',150)):
        for s,n in sizes.items(): savemat(root/f'{style}_{s}_32x32.mat', dict(X=colour(n, base).transpose(1, 2, 3, 0), y=numbers(n)))
    cells = np.empty((2,2), object)
    for i,n in enumerate(sizes.values()): cells[i,0],cells[i,1] = grey(n, 200).transpose(0, 3, 1, 2)/255,numbers(n)
    savemat(root/'usps_28x28.mat', dict(dataset=cells))
    return root

def test_digit5(tmp_path):
    d = from_digit5(digit5(tmp_path/'digits'), size=5)
    assert d.name == 'digit5' and d.source == 'digits' and d.train_x.shape == (60,5,5,3) and d.test_x.shape == (55,5,5,3) and d.classes == [*'0123456789']
    assert d.group_names == dict(domain=['mnist','mnistm','svhn','syn','usps']) and (d.train_x[:,0,-1] == 255).all() and (d.train_x[:,-1,0] < 255).all()
    for split,j,n in (('train',0,12), ('test',1,11)):                     # every image once, in its own part, and USPS not four times
        assert pixels(d, split) == [(50*g+i,)*3 for g in range(5) for i in range(n)]
        assert getattr(d, f'{split}_y').tolist() == [i%10 for _ in range(5) for i in range(n)] and d.group('domain')[j].tolist() == [g for g in range(5) for _ in range(n)]
    assert from_digit5(tmp_path/'digits', size=3).train_x.shape == (60,3,3,3)

def test_digit5_takes_some(tmp_path):
    root = digit5(tmp_path/'digits')
    a,b,c = (from_digit5(root, ('usps','mnist'), 5, 4, 3, seed=s) for s in (0, 0, 1))
    assert a.group_names == dict(domain=['usps','mnist']) and a.train_x.shape[0] == 8 and [p[0] for p in pixels(a, 'test')] == [200,201,202,0,1,2]
    assert (a.train_x == b.train_x).all() and (a.train_x != c.train_x).any() and [p[0]%50%10 for p in pixels(a, 'train')] == a.train_y.tolist()

def test_bad_digit5(tmp_path):
    from scipy.io import savemat
    refuses('svhn_train_32x32.mat|usps_28x28.mat|synth_test_32x32.mat', from_digit5, tmp_path)
    root = digit5(tmp_path/'digits')
    refuses("'syn'", from_digit5, root, ('synn',))
    X,y = np.zeros((5,5,3,2), np.uint8),np.array([[10],[1]])
    for what,said in ((dict(X=X), 'holds no y'), (dict(X=X[...,0], y=y), 'HWCN'), (dict(X=X, y=y+1), '0 to 10'), (dict(X=X, y=y[:1]), '2 numbers'), (dict(X=X-1., y=y), '0 … 255'),
        (dict(X=np.zeros((5,5,3,10)), y=np.ones((10,10))), 'rows of zeros with a one')):
        savemat(root/'svhn_train_32x32.mat', what)
        refuses(f'svhn_train_32x32.mat|{said}', from_digit5, root)
    for bytes in b'', b'?', pickle.dumps(dict(X=X, y=y)):
        (root/'svhn_train_32x32.mat').write_bytes(bytes)
        refuses('svhn_train_32x32.mat|damaged', from_digit5, root)

# CIFAR-10-C

def cifar_c(folder, n=20, kinds=('fog','snow')):
    for i,k in enumerate(kinds):
        a = np.zeros((5*n,32,32,3), np.uint8)
        a[...,0],a[...,1],a[...,2] = (np.arange(5*n)%n)[:,None,None],(np.arange(5*n)//n+1)[:,None,None],i
        np.save(folder/f'{k}.npy', a)
    np.save(folder/'labels.npy', np.tile(np.arange(n)%10, 5).astype(np.uint8))

def test_cifar_c_divides_by_photograph(tmp_path):
    cifar_c(tmp_path)
    d = from_cifar_c(tmp_path, severities=(2,5))
    for split,j in (('train',0),('test',1)):
        p = pixels(d, split)
        assert [tuple(r) for r in zip(d.group('image')[j], d.group('severity')[j], d.group('corruption')[j])] == p and len(p) == (64,16)[j] and len(set(p)) == len(p)
        assert [x%10 for x,_,_ in p] == getattr(d, f'{split}_y').tolist()
    assert not {x for x,_,_ in pixels(d, 'train')} & {x for x,_,_ in pixels(d, 'test')} and {s for _,s,_ in pixels(d, 'train')} == {2,5}
    one = from_cifar_c(tmp_path, ['snow'])
    assert one.group_names == dict(corruption=['snow']) and {p[1:] for p in pixels(one, 'test')} == {(5,1)}
    assert (one.group('image')[1] == d.group('image')[1][:4]).all()
    from fedbook.partition import natural, natural_test
    parts = natural(d.train_y, d.groups_of('train'), ['corruption','severity'])
    assert len(parts.clients) == 4 and [len(t) for t in natural_test(parts, d.groups_of('train'), d.groups_of('test'))] == [4]*4

def test_bad_cifar_c(tmp_path):
    refuses('labels.npy|fog.npy', from_cifar_c, tmp_path)
    np.save(tmp_path/'labels.npy', np.arange(5))
    refuses('labels.npy|fog.npy', from_cifar_c, tmp_path)
    cifar_c(tmp_path)
    refuses("'snow'", from_cifar_c, tmp_path, ['snou'])
    refuses('1 to 5', from_cifar_c, tmp_path, severities=(6,))
    np.save(tmp_path/'fog.npy', np.zeros((99,32,32,3), np.uint8))
    refuses('fog.npy|(100, 32, 32, 3)', from_cifar_c, tmp_path)
    (tmp_path/'fog.npy').write_bytes(b'?')
    refuses('fog.npy|damaged', from_cifar_c, tmp_path)
    for labels in np.arange(100), np.zeros(99, int), np.zeros((20,5), int), np.zeros(100), np.array(3):
        np.save(tmp_path/'labels.npy', labels)
        refuses('labels.npy|five times', from_cifar_c, tmp_path)

def test_pickles_are_never_read(tmp_path):
    class Bomb:
        def __reduce__(self): return os.mkdir, (str(tmp_path/'boom'),)
    cifar_c(tmp_path)
    for name in 'labels','fog':
        np.save(tmp_path/f'{name}.npy', np.array([Bomb()], dtype=object), allow_pickle=True)
        refuses(f'{name}.npy', from_cifar_c, tmp_path)
        cifar_c(tmp_path)
    (tmp_path/'fog.npy').write_bytes(pickle.dumps(Bomb()))
    refuses('fog.npy', from_cifar_c, tmp_path)
    assert not (tmp_path/'boom').exists()

# CelebA

def celeba(root, identity=True):
    names = ['Bald','Blond_Hair','Male']
    rows = {f'{i:06}.jpg': (-1, 1 if i%2 else -1, 1 if i%3 else -1) for i in range(1, 9)}
    for i,f in enumerate(rows, 1): draw(root/'img_align_celeba'/f, (20*i,)*3)
    (root/'list_attr_celeba.txt').write_text(f'8\n{" ".join(names)} \n' + ''.join(f'{f}  {"  ".join(map(str, r))}\n' for f,r in rows.items()))
    (root/'list_eval_partition.txt').write_text(''.join(f'{f} {(0,0,0,0,1,1,2,2)[i]}\n' for i,f in enumerate(rows)))
    if identity: (root/'identity_CelebA.txt').write_text(''.join(f'{f} {100+i//2}\n' for i,f in enumerate(rows)))
    return root

def test_celeba(tmp_path):
    d = from_celeba(celeba(tmp_path), groups=('Male','Bald'), size=5)
    assert d.train_y.tolist() == [1,0,1,0] and d.test_y.tolist() == [1,0] and d.group('Male')[0].tolist() == [1,1,0,1] and not d.group('Bald')[0].any()
    assert d.group('identity')[0].tolist() == [100,100,101,101] and d.classes == ['not Blond_Hair','Blond_Hair']
    assert [round(p[0]/20) for p in pixels(d, 'test')] == [7,8]
    os.remove(tmp_path/'identity_CelebA.txt')
    assert 'identity' not in from_celeba(tmp_path, target='Male', groups=()).groups

def test_bad_celeba(tmp_path):
    refuses('img_align_celeba', from_celeba, tmp_path)
    celeba(tmp_path)
    refuses("'Blond_Hair'", from_celeba, tmp_path, 'Blonde_Hair')
    good = (tmp_path/'list_attr_celeba.txt').read_text()
    for bad,said in ((good.replace('000001.jpg  -1', '000001.jpg'), '000001.jpg'), (good.replace('000001.jpg  -1', '000001.jpg  2'), '000001.jpg'), ('', 'no attribute'), (good.replace('000002.jpg', '../2.jpg'), '../2.jpg')):
        (tmp_path/'list_attr_celeba.txt').write_text(bad)
        refuses(said, from_celeba, tmp_path)
    (tmp_path/'list_attr_celeba.txt').write_text(good)
    (tmp_path/'identity_CelebA.txt').write_text('000001.jpg x\n')
    refuses('identity_CelebA.txt', from_celeba, tmp_path)

# CheXpert

HEAD = 'Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Edema\n'

def chexpert(root, rows):
    for i,r in enumerate(rows): draw(root/r.split(',')[0].split('/', 1)[1], i, 'L')
    (root/'train.csv').write_text(HEAD + '\n'.join(rows))
    return root

def row(i, view='Frontal', findings='1.0,', study=1, sex='Male', ap='AP'):
    return f'CheXpert-v1.0/train/patient{i:05}/study{study}/view1_{view.lower()}.jpg,{sex},60,{view},{ap if view=="Frontal" else ""},{findings}'

def test_chexpert_counts_one_finding_and_splits_by_patient(tmp_path):
    out = [row(90, 'Lateral'), row(91, findings='1.0,1.0'), row(92, findings=','), row(93, findings=',-1.0')]
    kept = [row(i, findings=(',1.0','1.0,','1.0,0.0','0.0,1.0')[i%4], sex=('Male','Female')[i%2], ap=('AP','PA')[i%2], study=s) for i in range(10) for s in (1,2)]
    d = from_chexpert(chexpert(tmp_path, out + kept), size=5)
    assert len(d.train_y) == 16 and len(d.test_y) == 4 and d.classes == ['No Finding','Edema'] and d.train_x.shape == (16,5,5)
    for j,y in enumerate((d.train_y, d.test_y)):
        who = d.group('patient')[j]
        assert (y == np.isin(who%4, (0,3))).all() and (d.group('female')[j] == who%2).all() and (d.group('ap')[j] == 1-who%2).all()
    assert not set(d.group('patient')[0]) & set(d.group('patient')[1]) and from_chexpert(tmp_path, size=5).fingerprint == d.fingerprint
    assert (d.train_x[:,0,0] // 2 - 2 == d.group('patient')[0]).all()

def test_bad_chexpert(tmp_path):
    refuses('train.csv', from_chexpert, tmp_path)
    chexpert(tmp_path, [row(1), row(1, study=2)])
    refuses('two patients', from_chexpert, tmp_path)
    refuses("'Oedema'", from_chexpert, tmp_path, ('No Finding','Oedema'))
    for bad,said in ((row(2, findings='x,'), 'train.csv'), (row(2).replace('patient','person'), 'patients'), (row(2).replace('study1','../..'), 'patients'), (row(2), 'patient00002')):
        (tmp_path/'train.csv').write_text(HEAD + '\n'.join([row(1), bad]))
        refuses(said, from_chexpert, tmp_path)

# FeTS2022

def nifti(path, v, slope=0., code=None, end='<'):
    "A volume written by hand: a header of 352 bytes, and numbers in Fortran's order"
    v,head = np.asarray(v),bytearray(352)
    def put(at, kind, *numbers): b = np.array(numbers, end+kind).tobytes(); head[at:at+len(b)] = b
    put(0, 'i4', 348), put(40, 'i2', v.ndim, *v.shape), put(70, 'i2', code or {'uint8': 2, 'int16': 4, 'float32': 16}[v.dtype.name]), put(108, 'f4', 352., slope, 5.*(slope!=0))
    head[344:348] = b'n+1\0'
    path.parent.mkdir(parents=True, exist_ok=True); path.write_bytes(gzip.compress(bytes(head)+v.astype(v.dtype.newbyteorder(end)).tobytes('F')))

def fets(root, n=10, institutions=2):
    ids = [f'FeTS2022_{i:05}' for i in range(n)]
    root.mkdir(parents=True); (root/'partitioning_1.csv').write_text('Partition_ID,Subject_ID\n'+'\n'.join(f'{1+i%institutions},{p}' for i,p in enumerate(ids)))
    for i,p in enumerate(ids):
        seg = np.zeros((6, 8, 7), np.uint8); seg[1,2,1:6],seg[3,3:5,1:6] = 1,4
        image = np.zeros((6, 8, 7), np.int16); image[:,:,1:6] = 10*(i+1); image[seg==4] = 1000
        nifti(root/p/f'{p}_seg.nii.gz', seg), nifti(root/p/f'{p}_flair.nii.gz', image)
    return root,ids

def test_a_volume_is_read_as_written(tmp_path):
    v = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    for end in '<>':
        nifti(tmp_path/'a.nii.gz', v, end=end); assert (volume(tmp_path/'a.nii.gz')==v).all()
    nifti(tmp_path/'a.nii.gz', v, slope=.5); assert np.allclose(volume(tmp_path/'a.nii.gz'), .5*v+5)

def test_fets(tmp_path):
    root,ids = fets(tmp_path/'fets')
    d = from_fets(root, slices=3)
    assert d.kind=='masks' and d.train_x.shape==(24,6,8) and d.test_y.shape==(6,6,8) and d.n_classes==4
    who,hospital = d.group('patient'),d.group('institution')
    assert not set(who[0]) & set(who[1]) and len(set(who[0]) | set(who[1]))==10 and all((h==p%2).all() for h,p in zip(hospital, who)) and set(hospital[1])=={0,1}
    assert (d.train_x[d.train_y==3]==255).all() and d.train_y[0,1,2]==1 and set(np.unique(d.train_y))=={0,1,3}
    assert all(round(1000*int(x[0,0])/255, -1)==10*(p+1) for x,p in zip(d.train_x, who[0])), 'each slice is its patient\'s'
    assert all((a==b).all() for a,b in zip(d.train_x, from_fets(root, slices=3).train_x))

def test_volumes_of_fets(tmp_path):
    root,ids = fets(tmp_path/'fets')
    d,few = from_fets(root, slices=None),from_fets(root, slices=3)
    assert d.kind=='masks' and d.train_x.shape==d.train_y.shape==(8,7,6,8) and d.images('test').shape==(2,1,7,6,8) and d.n_classes==4
    assert [set(p) for p in d.group('patient')]==[set(p) for p in few.group('patient')] and len(d.group('institution')[0])==8
    assert (d.train_y[:,2]==few.train_y[::3]).all() and all(round(1000*int(x[1,0,0])/255, -1)==10*(p+1) for x,p in zip(d.train_x, d.group('patient')[0]))
    deep = np.arange(1, 36)[None,None]*np.ones((1, 1, 1))
    assert len(planes(deep, 0*deep, None, 'one')[0])==32 and planes(deep, 0*deep, None, 'one')[0][0].item()==round(255*2/np.quantile(deep, .998))

def test_fets_in_one_sentence(tmp_path):
    refuses('FeTS2022|partitioning_1.csv', from_fets, tmp_path)
    root,ids = fets(tmp_path/'fets'); first = root/ids[0]
    refuses('partitioning_2', from_fets, root, 'partitioning_2')
    whole = (first/f'{ids[0]}_seg.nii.gz').read_bytes()
    for bad in (whole[:40], b'text', gzip.compress(b'x'*400), gzip.compress(gzip.decompress(whole)[:360])):
        (first/f'{ids[0]}_seg.nii.gz').write_bytes(bad); refuses(f'{ids[0]}_seg', from_fets, root)
    nifti(first/f'{ids[0]}_seg.nii.gz', np.zeros((6, 8, 6), np.uint8)); refuses(f'{ids[0]}|[6, 8, 7]|[6, 8, 6]', from_fets, root)
    nifti(first/f'{ids[0]}_seg.nii.gz', np.full((6, 8, 7), 3, np.uint8)); refuses('0, 1, 2 and 4', from_fets, root)
    (first/f'{ids[0]}_seg.nii.gz').unlink(); refuses(f'{ids[0]}_seg', from_fets, root)
    for text in ('Partition_ID,Subject_ID\n1,../x', 'Partition,Subject_ID\n1,a', 'Partition_ID,Subject_ID\n'):
        (root/'partitioning_1.csv').write_text(text); refuses('partitioning_1.csv|Partition_ID', from_fets, root)
